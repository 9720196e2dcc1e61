"""HTTP client to upstreams: the endpoints of others that speak OpenAI's or Anthropic's API."""

import asyncio
import logging
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
from gateway.remote.peers.http_client import make_client
from protocol.codec import BYTES_PER_TOKEN, UNREADABLE

log = logging.getLogger(__name__)

Header = tuple[bytes, bytes]

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
DRAIN_POLL_S: Final = 0.02
CONNECT_S: Final = 5.0
# The longest wait for the text of a refusal, which is for the log.
OPENING_S: Final = 5.0
BODY_BYTES_MAX: Final = 64 << 20
# Of a stream so much of its end is kept, where the usage stands.
TAIL_BYTES: Final = 16 * 1024
# No token of a prompt is shorter than a byte, but for those that a body does not show: instructions and a template of
# the upstream's own, and media behind URLs.
UNSEEN_TOKENS_MAX: Final = 1 << 16
# Of a sequence without another limit. Its text may be far shorter: reasoning is counted, and need not be sent.
COMPLETION_TOKENS_MAX: Final = 1 << 18
# Headers of a client that change what an answer is; all others are this daemon's.
_PASSED: Final = ("anthropic-version", "anthropic-beta")
_TOLD: Final = (b"retry-after",)
# Statuses by which an upstream speaks of itself or of our key; others are about the request.
_ITS_OWN: Final = frozenset({401, 402, 403, 404, 408, 429, 500, 502, 503, 504, 529})
# Those of them that are about our key alone.
_ABOUT_KEY: Final = frozenset({401, 402, 403})
# Of a refusal that is logged, so much, and of the type of an answer.
_OPENING_CHARS: Final = 500
_KIND_CHARS: Final = 100


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

    async def ask(self, upstream: UpstreamConfig, scope: Scope, body: bytes) -> "UpstreamResponse":
        """The beginning of an answer, whatever its status. Raises `Unreachable`."""
        path = scope["path"]
        suffix = path.removeprefix("/v1") if upstream.dialect == "openai" else path
        try:
            request = self._client(upstream).build_request(
                "POST", upstream.url + suffix, content=body, headers=_headers(upstream, Headers(scope=scope))
            )
            async with asyncio.timeout(upstream.first_byte_s):
                answer = UpstreamResponse(await self._client(upstream).send(request, stream=True), upstream)
        except (TimeoutError, httpx.TimeoutException):
            raise Unreachable("timeout", f"no answer within {upstream.first_byte_s:g} s") from None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise Unreachable("connection", str(error) or type(error).__name__) from None
        if fault := answer.fault:
            await answer.close()
            raise Unreachable("invalid", fault)
        return answer

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
        client = make_client(upstream.ca, upstream.silence_s, CONNECT_S)
        self._clients[upstream.name] = upstream, client
        return client


class UpstreamResponse:
    """One answer of an upstream, which is read once and closed."""

    def __init__(self, response: httpx.Response, upstream: UpstreamConfig) -> None:
        self._response = response
        self._name = upstream.name
        self._whole_s = upstream.first_byte_s + upstream.silence_s
        self._tail = b""
        self._bytes = 0
        self.status = response.status_code
        self.kind = response.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        self.is_stream = self.kind == EVENTS
        self.headers: list[Header] = [
            (name.lower(), value) for name, value in response.headers.raw if name.lower() in _TOLD
        ]

    @property
    def is_of_api(self) -> bool:
        """Whether its body is of a type that a client of the API expects: no page of a proxy, for example."""
        return self.kind in (JSON, EVENTS)

    @property
    def fault(self) -> str:
        """Why it is no answer of the API; empty where it is one, or a refusal."""
        if not (200 <= self.status < 300 or 400 <= self.status < 600):
            return f"its answer has status {self.status}"
        if self._response.headers.get("content-encoding", "identity") != "identity":
            return "its answer is compressed, which it was asked not to be"
        if self.status < 400 and not self.is_of_api:
            return f"its answer is of type {self.kind[:_KIND_CHARS]!r}"
        return ""

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
        text = b""
        try:
            async with asyncio.timeout(OPENING_S):
                async for piece in self.pieces():
                    text += piece
                    if len(text) >= _OPENING_CHARS:
                        break
        except (Unreachable, TimeoutError) as error:
            return f"(no text: {error})"
        return repr(text[:_OPENING_CHARS].decode(errors="replace"))

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body as it comes. Raises `Unreachable`."""
        try:
            async for piece in self._response.aiter_raw():
                self._tail = (self._tail + piece)[-TAIL_BYTES:]
                self._bytes += len(piece)
                yield piece
        except (httpx.HTTPError, OSError) as error:
            reason = "timeout" if isinstance(error, httpx.TimeoutException) else "connection"
            raise Unreachable(reason, str(error)) from None

    async def read(self) -> bytes:
        """All of the body. Raises `Unreachable`."""
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(self._whole_s):
                async for piece in self.pieces():
                    pieces.append(piece)
                    if self._bytes > BODY_BYTES_MAX:
                        raise Unreachable("too_large", f"an answer of more than {BODY_BYTES_MAX} bytes")
        except TimeoutError:
            raise Unreachable("timeout", f"an answer that was not whole after {self._whole_s:g} s") from None
        return b"".join(pieces)

    async def close(self) -> None:
        await self._response.aclose()

    def usage(self, body_bytes: int, sequences: int, max_tokens: int | None) -> tuple[int, int]:
        """Tokens of the prompt and of the answer: as the upstream counts them, or by their size where it does not, or
        counts more than there can be. `max_tokens` is of each sequence."""
        if self.status >= 400:
            return 0, 0
        prompt = completion = 0
        for counted in self._counts():
            prompt = max(prompt, counted.prompt_tokens, counted.input_tokens)
            completion = max(completion, counted.completion_tokens, counted.output_tokens)
        of_each = COMPLETION_TOKENS_MAX if max_tokens is None else min(max_tokens, COMPLETION_TOKENS_MAX)
        if prompt > body_bytes + UNSEEN_TOKENS_MAX or completion > max(self._bytes, sequences * of_each):
            log.warning("upstream %s counts more tokens than there can be; they are estimated", self._name)
            prompt = completion = 0
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


def _headers(upstream: UpstreamConfig, client: Headers) -> list[Header]:
    """Nothing of the client but what its dialect needs: neither its key nor its address. Raises as `read_secret`."""
    headers = {"content-type": JSON, "user-agent": "mlxd"}
    headers |= {name: client[name] for name in _PASSED if name in client}
    if upstream.key_file:
        secret = read_secret(Path(upstream.key_file))
        headers |= {"x-api-key": secret} if upstream.dialect == "anthropic" else {"authorization": f"Bearer {secret}"}
    # As they came: a value of bytes beyond ASCII is for the upstream to refuse.
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
