"""HTTP client to upstreams: the endpoints of others that speak OpenAI's or Anthropic's API."""

import asyncio
import ssl
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.config.peer_tables import read_secret
from gateway.config.remote_settings import UpstreamConfig
from gateway.peers.affinity import BYTES_PER_TOKEN
from protocol.codec import UNREADABLE

Header = tuple[bytes, bytes]

DRAIN_POLL_S: Final = 0.02
CONNECT_S: Final = 5.0
KEPT_CONNECTIONS: Final = 32
BODY_BYTES_MAX: Final = 64 << 20
# Of a stream so much of its end is kept, where the usage stands.
TAIL_BYTES: Final = 16 * 1024
# Headers of a client that change what an answer is; all others are this daemon's.
_PASSED: Final = ("anthropic-version", "anthropic-beta")
_TOLD: Final = (b"retry-after",)
# Statuses by which an upstream speaks of itself or of our key; others are about the request.
_ITS_OWN: Final = frozenset({401, 402, 403, 404, 408, 429, 500, 502, 503, 504, 529})
# Those of them that are about our key alone.
_ABOUT_KEY: Final = frozenset({401, 402, 403})
# Of a refusal that is logged, so much.
_OPENING_CHARS: Final = 500


class Unreachable(Exception):
    """There is no answer, or no more of it. `reason` is for the metrics."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _Counted(msgspec.Struct, frozen=True):
    usage: _Usage | None = None


_counted: Final = msgspec.json.Decoder(_Counted)


class Clients:
    """One client for each upstream, made at its first request. All on the event loop."""

    def __init__(self) -> None:
        # By the upstream's name, with the configuration that it was made for.
        self._clients: dict[str, tuple[UpstreamConfig, httpx.AsyncClient]] = {}
        self._replaced: list[httpx.AsyncClient] = []
        self._running = 0

    async def ask(self, upstream: UpstreamConfig, scope: Scope, body: bytes) -> "Answer":
        """The beginning of an answer, whatever its status. Raises `Unreachable`."""
        path = scope["path"]
        suffix = path.removeprefix("/v1") if upstream.dialect == "openai" else path
        try:
            request = self._client(upstream).build_request(
                "POST", upstream.url + suffix, content=body, headers=_headers(upstream, Headers(scope=scope))
            )
            async with asyncio.timeout(upstream.first_byte_s):
                return Answer(await self._client(upstream).send(request, stream=True))
        except (TimeoutError, httpx.TimeoutException):
            raise Unreachable("timeout", f"no answer within {upstream.first_byte_s:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise Unreachable("connection", str(error) or type(error).__name__) from None

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Be a request that `drain` waits for."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def drain(self, deadline_s: float) -> None:
        """Let what runs at upstreams finish until the deadline."""
        end = asyncio.get_running_loop().time() + deadline_s
        while self._running and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 - tasks of many requests
            await asyncio.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        """Close the connections to all upstreams. The last call."""
        for client in (*self._replaced, *(client for _, client in self._clients.values())):
            await client.aclose()

    def _client(self, upstream: UpstreamConfig) -> httpx.AsyncClient:
        known = self._clients.get(upstream.name)
        if known is not None and known[0] == upstream:
            return known[1]
        if known is not None:
            self._replaced.append(known[1])
        client = httpx.AsyncClient(
            verify=ssl.create_default_context(cafile=upstream.ca or None),
            trust_env=False,
            timeout=httpx.Timeout(upstream.silence_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS),
        )
        self._clients[upstream.name] = upstream, client
        return client


class Answer:
    """One answer of an upstream, which is read once and closed."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self._tail = b""
        self._bytes = 0
        self.status = response.status_code
        self.kind = response.headers.get("content-type", "application/json").encode()
        self.is_stream = self.kind.startswith(b"text/event-stream")
        self.headers: list[Header] = [
            (name.lower(), value) for name, value in response.headers.raw if name.lower() in _TOLD
        ]

    @property
    def is_its_own(self) -> bool:
        """Whether a refusal is about the upstream or its key, so that another may take the request."""
        return self.status in _ITS_OWN

    @property
    def is_about_key(self) -> bool:
        """Whether a refusal is about our key, which is no news for a client."""
        return self.status in _ABOUT_KEY

    async def opening(self) -> str:
        """The first characters of the body, for the log; as much of it as there is."""
        try:
            return repr((await self.read())[:_OPENING_CHARS].decode(errors="replace"))
        except Unreachable as error:
            return f"(no text: {error})"

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body as it comes. Raises `Unreachable`."""
        try:
            async for piece in self._response.aiter_bytes():
                self._tail = (self._tail + piece)[-TAIL_BYTES:]
                self._bytes += len(piece)
                yield piece
        except (httpx.HTTPError, OSError) as error:
            reason = "timeout" if isinstance(error, httpx.TimeoutException) else "connection"
            raise Unreachable(reason, str(error)) from None

    async def read(self) -> bytes:
        """All of the body. Raises `Unreachable`."""
        pieces: list[bytes] = []
        async for piece in self.pieces():
            pieces.append(piece)
            if self._bytes > BODY_BYTES_MAX:
                raise Unreachable("too_large", f"an answer of more than {BODY_BYTES_MAX} bytes")
        return b"".join(pieces)

    async def close(self) -> None:
        await self._response.aclose()

    def usage(self, body_bytes: int) -> tuple[int, int]:
        """Tokens of the prompt and of the answer: as the upstream says, or by their size where it does not."""
        if self.status >= 400:
            return 0, 0
        prompt = completion = 0
        for counted in self._counts():
            prompt = max(prompt, counted.prompt_tokens, counted.input_tokens)
            completion = max(completion, counted.completion_tokens, counted.output_tokens)
        return prompt or body_bytes // BYTES_PER_TOKEN, completion or self._bytes // BYTES_PER_TOKEN

    def _counts(self) -> Iterator[_Usage]:
        lines = self._tail.split(b"\n") if self.is_stream else [self._tail]
        for line in lines:
            try:
                counted = _counted.decode(line.removeprefix(b"data:").strip())
            except UNREADABLE:
                continue
            if counted.usage is not None:
                yield counted.usage


def _headers(upstream: UpstreamConfig, client: Headers) -> dict[str, str]:
    """Nothing of the client but what its dialect needs: neither its key nor its address. Raises as `read_secret`."""
    headers = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "mlxd"}
    headers |= {name: client[name] for name in _PASSED if name in client}
    if upstream.key_file:
        secret = read_secret(Path(upstream.key_file))
        headers |= {"x-api-key": secret} if upstream.dialect == "anthropic" else {"authorization": f"Bearer {secret}"}
    return headers
