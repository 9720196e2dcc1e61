"""HTTP client to upstreams: other servers with OpenAI's or Anthropic's API.

HTTP clients to upstreams: no proxy, no redirects, no cookies, and no compression.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import contextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy
from pathlib import Path
from typing import Final

import httpx2
import msgspec
from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.config.load import read_secret
from gateway.config.settings import UpstreamConfig
from protocol.codec import BYTES_PER_TOKEN, UNREADABLE

log = logging.getLogger(__name__)

KEPT_CONNECTIONS: Final = 32


def make_client(
    silence_s: float,
    connect_s: float,
    base_url: str = "",
    transport: httpx2.AsyncBaseTransport | None = None,
) -> httpx2.AsyncClient:
    """Make an HTTP client, which the requests of all API keys share. It trusts the authorities of SSL_CERT_FILE, or
    those of the system. `transport` replaces the connections of this machine.

    Cookies are disabled, because with them the server could link the requests of different keys.
    """
    return httpx2.AsyncClient(
        base_url=base_url,
        transport=transport,
        verify=ssl.create_default_context() if transport is None else False,
        trust_env=False,
        follow_redirects=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        # Responses are read as raw bytes and are never decompressed.
        headers={"accept-encoding": "identity"},
        timeout=httpx2.Timeout(silence_s, connect=connect_s),
        limits=httpx2.Limits(max_connections=None, max_keepalive_connections=KEPT_CONNECTIONS),
    )


Header = tuple[bytes, bytes]

JSON: Final = "application/json"
EVENTS: Final = "text/event-stream"
DRAIN_POLL_S: Final = 0.02
CONNECT_S: Final = 5.0
FIRST_BYTE_S: Final = 300.0
SILENCE_S: Final = 300.0
# Reading the text of a refusal, which is only logged, takes at most this time.
EXCERPT_TIMEOUT_S: Final = 5.0
BODY_BYTES_MAX: Final = 64 << 20
# The last TAIL_BYTES of a stream are kept, because they contain the usage.
TAIL_BYTES: Final = 16 * 1024
# An upstream may report more prompt tokens than the body has bytes, by up to this number. It adds its own instructions
# and template, and downloads media given by URL.
UNSEEN_TOKENS_MAX: Final = 1 << 16
# An upstream may report up to this many tokens of a sequence without `max_tokens`. The size of the text is no limit,
# because reasoning may be counted without being sent.
COMPLETION_TOKENS_MAX: Final = 1 << 18
# Headers that are passed from clients to upstreams, and from upstreams to clients.
_REQUEST_HEADERS: Final = ("anthropic-version", "anthropic-beta")
_RESPONSE_HEADERS: Final = (b"retry-after",)
# Statuses that mean a problem of the upstream or of this daemon's key, not of the request. _KEY_STATUSES are those
# about the key.
_UPSTREAM_STATUSES: Final = frozenset({401, 402, 403, 404, 408, 429, 500, 502, 503, 504, 529})
_KEY_STATUSES: Final = frozenset({401, 402, 403})
_EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n")
# Maximum number of characters that are logged of a refusal, and of an unexpected media type.
_EXCERPT_CHARS: Final = 500
_KIND_CHARS: Final = 100


class Unreachable(Exception):
    """The upstream did not respond, or its response broke off. `reason` is for the metrics; `is_sent` is False if the
    upstream got nothing of the request.
    """

    def __init__(self, reason: str, text: str, *, is_sent: bool = True) -> None:
        super().__init__(text)
        self.reason = reason
        self.is_sent = is_sent


class _UpstreamUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


class _CountedAnswer(msgspec.Struct, frozen=True):
    usage: _UpstreamUsage | None = None


_counted: Final = msgspec.json.Decoder(_CountedAnswer)


class Clients:
    """HTTP clients of upstreams. Each is made at its first request. Used on the event loop only.

    `transport` replaces the connections of this machine.
    """

    def __init__(self, transport: httpx2.AsyncBaseTransport | None = None) -> None:
        self._transport = transport
        # Maximum waits for the beginning of an answer, and from one part of it to the next.
        self.first_byte_s = FIRST_BYTE_S
        self.silence_s = SILENCE_S
        # Maps upstreams to their client and the configuration for which the client was made.
        self._clients: dict[str, tuple[UpstreamConfig, httpx2.AsyncClient]] = {}
        self._replaced: list[httpx2.AsyncClient] = []
        self._running = 0

    async def send(self, upstream: UpstreamConfig, scope: Scope, body: bytes) -> "UpstreamResponse":
        """Send a request and return the response as soon as its header has arrived, whatever its status. Raises
        `Unreachable`.
        """
        path = scope["path"]
        suffix = path.removeprefix("/v1") if upstream.dialect == "openai" else path
        try:
            request = self._client(upstream).build_request(
                "POST", upstream.url + suffix, content=body, headers=_headers(upstream, Headers(scope=scope))
            )
            async with asyncio.timeout(self.first_byte_s):
                response = await self._client(upstream).send(request, stream=True)
            answer = UpstreamResponse(response, upstream, self.first_byte_s + self.silence_s)
        except httpx2.ConnectTimeout:
            raise Unreachable("timeout", f"no connection within {CONNECT_S:g} s", is_sent=False) from None
        except (TimeoutError, httpx2.TimeoutException):
            raise Unreachable("timeout", f"no answer within {self.first_byte_s:g} s") from None
        except (httpx2.HTTPError, OSError, ValueError) as error:
            is_sent = isinstance(error, httpx2.HTTPError) and not isinstance(error, httpx2.ConnectError)
            raise Unreachable("connection", str(error) or type(error).__name__, is_sent=is_sent) from None
        if fault := answer.fault:
            await answer.close()
            raise Unreachable("invalid", fault)
        return answer

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Count a request that `drain` waits for."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def drain(self, deadline_s: float) -> None:
        """Let requests at upstreams finish until the deadline."""
        end = asyncio.get_running_loop().time() + deadline_s
        while self._running and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110 - tasks of many requests
            await asyncio.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        """Close the connections to all upstreams."""
        for client in (*self._replaced, *(client for _, client in self._clients.values())):
            await client.aclose()

    def _client(self, upstream: UpstreamConfig) -> httpx2.AsyncClient:
        known = self._clients.get(upstream.name)
        if known is not None and known[0] == upstream:
            return known[1]
        if known is not None:
            self._replaced.append(known[1])
        client = make_client(self.silence_s, CONNECT_S, transport=self._transport)
        self._clients[upstream.name] = upstream, client
        return client


class UpstreamResponse:
    """Response of an upstream, which must be read once and closed."""

    def __init__(self, response: httpx2.Response, upstream: UpstreamConfig, whole_s: float) -> None:
        """An answer that is no stream must end within `whole_s`."""
        self._response = response
        self._name = upstream.name
        self._whole_s = whole_s
        self._tail = b""
        self._bytes = 0
        self.status = response.status_code
        self.kind = response.headers.get("content-type", JSON).partition(";")[0].strip().lower()
        self.is_stream = self.kind == EVENTS
        # Whether what has arrived shows what was generated: a stream does at any time, another answer at its end.
        self.is_received = self.is_stream
        self.headers: list[Header] = [
            (name.lower(), value) for name, value in response.headers.raw if name.lower() in _RESPONSE_HEADERS
        ]

    @property
    def is_of_api(self) -> bool:
        """Whether the response has a media type of the API. An error page of a proxy has not."""
        return self.kind in (JSON, EVENTS)

    @property
    def has_end(self) -> bool:
        """Whether a stream's last event is the API's mark of its end, after which clients read nothing."""
        last = self._tail.rstrip().rpartition(b"\n")[2].removeprefix(b"data:").strip()
        return self._tail.endswith(_EVENT_ENDS) and (last == b"[DONE]" or b'"message_stop"' in last)

    @property
    def fault(self) -> str:
        """Reason why this is neither a response of the API nor a refusal; empty if it is one of these."""
        if not (200 <= self.status < 300 or 400 <= self.status < 600):
            return f"its answer has status {self.status}"
        if self._response.headers.get("content-encoding", "identity") != "identity":
            return "its answer is compressed, which it was asked not to be"
        if self.status < 400 and not self.is_of_api:
            return f"its answer is of type {self.kind[:_KIND_CHARS]!r}"
        return ""

    @property
    def is_its_own(self) -> bool:
        """Whether a refusal is because of the upstream or the key, so that another upstream may serve the request."""
        return self.status in _UPSTREAM_STATUSES

    @property
    def is_about_key(self) -> bool:
        """Whether a refusal is because of this daemon's key. Such a refusal must not be shown to clients."""
        return self.status in _KEY_STATUSES

    async def excerpt(self) -> str:
        """Read the first characters of the body, for the log."""
        text = b""
        try:
            async with asyncio.timeout(EXCERPT_TIMEOUT_S):
                async for piece in self.pieces():
                    text += piece
                    if len(text) >= _EXCERPT_CHARS:
                        break
        except (Unreachable, TimeoutError) as error:
            return f"(no text: {error})"
        return repr(text[:_EXCERPT_CHARS].decode(errors="replace"))

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body as it is received. Raises `Unreachable`."""
        try:
            async for piece in self._response.aiter_raw():
                self._tail = (self._tail + piece)[-TAIL_BYTES:]
                self._bytes += len(piece)
                yield piece
            self.is_received = True
        except (httpx2.HTTPError, OSError) as error:
            reason = "timeout" if isinstance(error, httpx2.TimeoutException) else "connection"
            raise Unreachable(reason, str(error)) from None

    async def read(self) -> bytes:
        """Read the whole body. Raises `Unreachable`."""
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
        """Return the prompt and completion tokens that the upstream reports. A missing or impossible count is replaced
        by an estimate from the sizes. `max_tokens` is the limit of each sequence.
        """
        if self.status >= 400:
            return 0, 0
        prompt = completion = 0
        for counted in self._counts():
            prompt = max(prompt, counted.prompt_tokens, counted.input_tokens)
            completion = max(completion, counted.completion_tokens, counted.output_tokens)
        sequence_max = COMPLETION_TOKENS_MAX if max_tokens is None else min(max_tokens, COMPLETION_TOKENS_MAX)
        if prompt > body_bytes + UNSEEN_TOKENS_MAX or completion > max(self._bytes, sequences * sequence_max):
            log.warning("upstream %s counts more tokens than there can be; they are estimated", self._name)
            prompt = completion = 0
        return prompt or body_bytes // BYTES_PER_TOKEN, completion or self._bytes // BYTES_PER_TOKEN

    def _counts(self) -> Iterator[_UpstreamUsage]:
        lines = self._tail.split(b"\n") if self.is_stream else [self._tail]
        for line in lines:
            try:
                counted = _counted.decode(line.removeprefix(b"data:").strip())
            except UNREADABLE:
                continue
            if counted.usage is not None:
                yield counted.usage


def _headers(upstream: UpstreamConfig, client: Headers) -> list[Header]:
    """Return the headers for an upstream, without the client's key and address. Raises `OSError`, `ValueError`."""
    headers = {"content-type": JSON, "user-agent": "mlxd"}
    headers |= {name: client[name] for name in _REQUEST_HEADERS if name in client}
    if upstream.key_file:
        secret = read_secret(Path(upstream.key_file))
        headers |= {"x-api-key": secret} if upstream.dialect == "anthropic" else {"authorization": f"Bearer {secret}"}
    # Non-ASCII values are passed unchanged; the upstream may refuse them.
    return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
