"""One peer: the HTTP client to it, what it says of itself once a second, and how far it is trusted to answer."""

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
from gateway.remote.peers.http_client import make_client
from gateway.remote.peers.validation import check_model
from protocol.codec import MalformedFrame
from protocol.minors import MAJOR, MINOR
from protocol.peering import GENERATE_PATH, STATUS_PATH, PeerModel, PeerStatus, decode_status

log = logging.getLogger(__name__)

POLL_S: Final = 1.0
CONNECT_S: Final = 1.0
STATUS_S: Final = 2.0
# From the whole request to the first byte of its answer, and between two of those; a large body needs its time.
ACCEPT_S: Final = 2.0
SILENCE_S: Final = 5.0
UPLOAD_BYTES_PER_S: Final = 4_000_000
# A status that is older says nothing.
STALE_S: Final = 4.0
STATUS_BYTES_MAX: Final = 256 << 10
MODELS_MAX: Final = 1000
# Of the text of an answer that is no 200, which is for the log.
REFUSAL_BYTES_MAX: Final = 4 << 10
# After failures in a row nothing is sent for a while that doubles, within these.
PAUSE_S: Final = (1.0, 30.0)
KEY_REFUSED_S: Final = 30.0
# A model that a peer names and does not serve, or has no room for.
ABSENT_S: Final = 30.0
BUSY_S: Final = 1.0


class PeerDeclined(Exception):
    """The peer answered with another status than 200: it takes the request not, or not now."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:200]}")
        self.status = status


class PeerNode:
    """One peer, on the event loop of its fleet, which polls it."""

    def __init__(self, config: PeerConfig, boot: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`boot` is of this gateway, by which a peer that is this daemon itself is known."""
        self.config = config
        self.name = config.name
        self.status: PeerStatus | None = None
        # Why nothing is sent to it; empty while requests may go there.
        self.problem = "not heard of yet"
        self.failures: Counter[str] = Counter()
        # Tokens of prompts that were sent since its newest status, which cannot know of them yet.
        self.sent: Counter[str] = Counter()
        self._boot = boot
        self._clock = clock
        self._seen_at = -STALE_S
        self._failed_in_a_row = 0
        self._paused_until = 0.0
        self._blocked: dict[str, float] = {}
        self._client = make_client(config.ca, SILENCE_S, CONNECT_S, config.url)

    async def close(self) -> None:
        await self._client.aclose()

    @property
    def is_up(self) -> bool:
        """Whether requests may be sent to it now."""
        now = self._clock()
        return not self.problem and now - self._seen_at < STALE_S and now >= self._paused_until

    @property
    def state(self) -> str:
        """In words, for people."""
        if self.is_up:
            return "up"
        if self.problem:
            return self.problem
        return "paused after a failure" if self._clock() < self._paused_until else "silent"

    def model(self, name: str) -> PeerModel | None:
        """Its model of this name or alias, unless it has just declined to serve it."""
        models = () if self.status is None else self.status.models
        model = next((each for each in models if name == each.name or name in each.aliases), None)
        return None if model is None or self._blocked.get(model.name, 0.0) > self._clock() else model

    def block(self, name: str, s: float) -> None:
        """Ask it for the model of this name, which is the one it has there, no more for a while."""
        self._blocked[name] = self._clock() + s

    def failed(self, reason: str) -> None:
        """Note a failure of its own: no connection, silence, nonsense."""
        self.failures[reason] += 1
        if self._clock() < self._paused_until:
            return  # the same failure, of all the streams that it had
        self._failed_in_a_row += 1
        least, most = PAUSE_S
        self._paused_until = self._clock() + min(most, least * 2 ** min(self._failed_in_a_row - 1, 10))
        log.warning("peer %s failed (%s)", self.name, reason)

    def served(self) -> None:
        """Note an answer from its first byte to its last."""
        self._failed_in_a_row = 0

    async def poll(self) -> bool:
        """Ask for its status. Returns whether its gateway was started since the last one."""
        boot = None if self.status is None else self.status.boot
        try:
            status = await self._ask_status()
        except (httpx.HTTPError, TimeoutError, MalformedFrame, OSError, ValueError) as error:
            self._set_problem(_words(error))
            return False
        except PeerDeclined as error:
            self._set_problem("its key is refused there" if error.status in (401, 403) else str(error))
            return False
        self.status, self._seen_at = status, self._clock()
        self.sent.clear()
        self._set_problem(self._objection(status))
        return boot is not None and boot != status.boot

    @asynccontextmanager
    async def generate(self, body: bytes, headers: dict[str, str]) -> AsyncGenerator[httpx.Response]:
        """The answer to a `PeerRequest`, whose status is 200. Raises `PeerDeclined`, `httpx.HTTPError`,
        `TimeoutError`.
        """
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

    async def _ask_status(self) -> PeerStatus:
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
        """The key that it has made for us, read each time: a new one counts at once. Raises `OSError`, `ValueError`."""
        return read_secret(Path(self.config.key_file))

    def _objection(self, status: PeerStatus) -> str:
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
    """The beginning of an answer's text, as it came."""
    data = b""
    async for piece in response.aiter_raw(REFUSAL_BYTES_MAX):
        data += piece
        if len(data) >= REFUSAL_BYTES_MAX:
            break
    return data[:REFUSAL_BYTES_MAX].decode(errors="replace")


def _words(error: Exception) -> str:
    """Description of a failed call, in few words."""
    match error:
        case httpx.ConnectTimeout() | httpx.ReadTimeout() | TimeoutError():
            return "it does not answer in time"
        case httpx.ConnectError():
            return f"no connection: {error}"
        case MalformedFrame():
            return f"its answer is not understood: {error}"
        case _:
            return f"{type(error).__name__}: {error}"
