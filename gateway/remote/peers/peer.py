"""Peer node: the HTTP client for one other daemon. It polls the daemon's status every second and records
its failures.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import httpx

from gateway.config.peer_tables import read_secret
from gateway.config.remote_settings import PeerConfig
from gateway.remote.http_client import make_client
from gateway.remote.peers.validation import check_model
from protocol.codec import MalformedFrame
from protocol.minors import MAJOR, MINOR
from protocol.peering import GENERATE_PATH, STATUS_PATH, PeerModel, PeerStatus, decode_status

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
CONNECT_S: Final = 1.0
STATUS_S: Final = 2.0
# Time-outs: ACCEPT_S from the end of the request to the first byte of the response, then SILENCE_S between bytes.
ACCEPT_S: Final = 2.0
SILENCE_S: Final = 5.0
# Time-outs are extended by the time that an upload takes at this speed.
UPLOAD_BYTES_PER_S: Final = 4_000_000
# A peer's status that is older than this is ignored.
STALE_S: Final = 4.0
STATUS_BYTES_MAX: Final = 256 << 10
MODELS_MAX: Final = 1000
# If a response has another status than 200, at most this many bytes of it are logged.
REFUSAL_BYTES_MAX: Final = 4 << 10
# Back-off after failures in seconds: the first pause, which doubles with each consecutive failure, and the longest.
PAUSE_S: Final = (1.0, 30.0)
# A peer gets no requests for a model for this time after it refused the key, lacked the model, or was full.
KEY_REFUSED_S: Final = 30.0
ABSENT_S: Final = 30.0
BUSY_S: Final = 1.0


class PeerDeclined(Exception):
    """Raised when a peer responds with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:200]}")
        self.status = status


class PeerNode:
    """One peer. Its fleet polls it, on the fleet's event loop."""

    def __init__(
        self,
        config: PeerConfig,
        boot: int,
        clock: Callable[[], float] = time.monotonic,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Set up the peer. `boot` is the number of this gateway's boot. A peer that reports the same number is this
        daemon itself.
        """
        self.config = config
        self.name = config.name
        self.status: PeerStatus | None = None
        # Reason why no requests may be sent to this peer; empty if there is none.
        self.problem = "not heard of yet"
        self.failures: Counter[str] = Counter()
        # Maps models to the prompt tokens that were sent to the peer since it reported its newest status.
        self.unreported_tokens: Counter[str] = Counter()
        self._boot = boot
        self._clock = clock
        self._status_at = -STALE_S
        self._consecutive_failures = 0
        self._paused_until = 0.0
        # Maps models to the time until which the peer gets no requests for them.
        self._blocked_until: dict[str, float] = {}
        self._client = make_client(config.ca, SILENCE_S, CONNECT_S, config.url, transport)

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def is_up(self) -> bool:
        """Whether requests may be sent to this peer now."""
        now = self._clock()
        return not self.problem and now - self._status_at < STALE_S and now >= self._paused_until

    @property
    def state(self) -> str:
        """Description of the peer's state, for operators."""
        if self.is_up:
            return "up"
        if self.problem:
            return self.problem
        return "paused after a failure" if self._clock() < self._paused_until else "silent"

    def model(self, name: str) -> PeerModel | None:
        """Return the peer's model of this name or alias, unless the model is blocked."""
        models = () if self.status is None else self.status.models
        model = next((each for each in models if name == each.name or name in each.aliases), None)
        return None if model is None or self._blocked_until.get(model.name, 0.0) > self._clock() else model

    def block(self, name: str, pause_s: float) -> None:
        """Send the peer no requests for a model for `pause_s`. `name` is the model's name at the peer."""
        self._blocked_until[name] = self._clock() + pause_s

    def note_failure(self, reason: str) -> None:
        """Count a failure of the peer itself, and send it no requests for a while."""
        self.failures[reason] += 1
        if self._clock() < self._paused_until:
            return  # Failures during a pause do not lengthen it.
        self._consecutive_failures += 1
        first_s, longest_s = PAUSE_S
        self._paused_until = self._clock() + min(longest_s, first_s * 2 ** min(self._consecutive_failures - 1, 10))
        log.warning("peer %s failed (%s)", self.name, reason)

    def note_success(self) -> None:
        self._consecutive_failures = 0

    async def poll(self) -> bool:
        """Update the peer's status. Returns whether the peer's gateway has restarted since the previous status."""
        boot = None if self.status is None else self.status.boot
        try:
            status = await self._fetch_status()
        except (httpx.HTTPError, TimeoutError, MalformedFrame, OSError, ValueError) as error:
            self._set_problem(_description(error))
            return False
        except PeerDeclined as error:
            self._set_problem("its key is refused there" if error.status in (401, 403) else str(error))
            return False
        self.status, self._status_at = status, self._clock()
        self.unreported_tokens.clear()
        self._set_problem(self._problem_of(status))
        return boot is not None and boot != status.boot

    @asynccontextmanager
    async def generate(self, body: bytes, headers: dict[str, str]) -> AsyncGenerator[httpx.Response]:
        """Yield the response to a `PeerRequest`. Raises `PeerDeclined`, `httpx.HTTPError`, `TimeoutError`."""
        request = self._client.build_request("POST", GENERATE_PATH, content=body, headers=self._authorized() | headers)
        async with asyncio.timeout(CONNECT_S + ACCEPT_S + len(body) / UPLOAD_BYTES_PER_S):
            response = await self._client.send(request, stream=True)
        try:
            if response.status_code != 200:
                async with asyncio.timeout(ACCEPT_S):
                    raise PeerDeclined(response.status_code, await _refusal(response))
            yield response
        finally:
            await response.aclose()

    async def _fetch_status(self) -> PeerStatus:
        async with asyncio.timeout(STATUS_S):
            async with self._client.stream("GET", STATUS_PATH, headers=self._authorized()) as response:
                data = b""
                async for piece in response.aiter_raw():
                    data += piece
                    if len(data) > STATUS_BYTES_MAX:
                        raise MalformedFrame(f"a status of more than {STATUS_BYTES_MAX} bytes")
        if response.status_code != 200:
            raise PeerDeclined(response.status_code, data.decode(errors="replace"))
        status = decode_status(data)
        if len(status.models) > MODELS_MAX:
            raise MalformedFrame(f"a status of more than {MODELS_MAX} models")
        for model in status.models:
            check_model(model)
        return status

    def _authorized(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.secret}"}

    @property
    def secret(self) -> str:
        """Read the key for this peer. The file is read each time, so that a new key takes effect. Raises `OSError`,
        `ValueError`.
        """
        return read_secret(Path(self.config.key_file))

    def _problem_of(self, status: PeerStatus) -> str:
        if status.boot == self._boot:
            return "it is this daemon itself"
        if status.major != MAJOR or status.minor < MINOR:
            return f"it speaks protocol {status.major}.{status.minor}, and {MAJOR}.{MINOR} is needed"
        return "it is draining" if status.is_draining else ""

    def _set_problem(self, problem: str) -> None:
        if problem != self.problem:
            level = logging.WARNING if problem else logging.INFO
            log.log(level, "peer %s: %s", self.name, problem or "up")
        self.problem = problem


async def _refusal(response: httpx.Response) -> str:
    """Read the first characters of a response."""
    data = b""
    async for piece in response.aiter_raw(REFUSAL_BYTES_MAX):
        data += piece
        if len(data) >= REFUSAL_BYTES_MAX:
            break
    return data[:REFUSAL_BYTES_MAX].decode(errors="replace")


def _description(error: Exception) -> str:
    match error:
        case httpx.ConnectTimeout() | httpx.ReadTimeout() | TimeoutError():
            return "it does not answer in time"
        case httpx.ConnectError():
            return f"no connection: {error}"
        case MalformedFrame():
            return f"its answer is not understood: {error}"
        case _:
            return f"{type(error).__name__}: {error}"
