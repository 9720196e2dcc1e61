"""A small HTTP/1.1 client for streams. It uses so little CPU time that it can share two cores with the server it
measures.

One `BenchConnection` carries one request at a time. Everything that happens per event happens in the socket's callback:
no task is woken before the answer is complete. A general client costs as much per token as the gateway that it
measures.
"""

import asyncio
import signal
import ssl
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast

import httptools
import msgspec

T = TypeVar("T")

_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _BenchUsage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _BenchUsage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Reply:
    """Answer to one request. Times are seconds of `time.perf_counter`. The connection changes it until `ended`."""

    sent: float = 0.0
    ended: float = 0.0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    # Arrival times of the events with text, and their texts.
    times: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    is_done: bool = False
    error: str = ""
    body: bytes = b""

    @property
    def ok(self) -> bool:
        return self.status == 200 and not self.error

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Target:
    """Address of the server: a unix socket if one is given, else a host and a port."""

    host: str
    port: int
    prefix: str = ""
    tls: bool = False
    api_key: str = ""
    socket: str = ""

    def request(self, path: str, body: bytes | None) -> bytes:
        """Encode a request; it is a POST if there is a body."""
        key = f"authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        head = f"{'GET' if body is None else 'POST'} {self.prefix}{path} HTTP/1.1\r\nhost: {host}:{self.port}\r\n{key}"
        if body is None:
            return f"{head}\r\n".encode()
        return f"{head}content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class BenchConnection(asyncio.Protocol):
    """A socket that is kept open between requests, and opened again if the server has closed it.

    `reply` belongs to the current or last request and fills as the answer arrives.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self.reply = Reply()
        self._done: asyncio.Future[None] | None = None
        self._lost = asyncio.Event()
        self._lost.set()
        self._rest = b""
        self._is_stream = False

    async def connect(self) -> None:
        """Connect unless connected. Raises OSError."""
        if self._transport is None or self._transport.is_closing():
            loop = asyncio.get_running_loop()
            if self._target.socket:
                await loop.create_unix_connection(lambda: self, self._target.socket)
                return
            context = ssl.create_default_context() if self._target.tls else None
            await loop.create_connection(lambda: self, self._target.host, self._target.port, ssl=context)

    async def request(self, path: str, body: bytes | None = None, timeout_s: float = 600.0) -> Reply:
        """Send a request and wait for the whole answer. An error of the server is in `Reply.error` and
        raises nothing.
        """
        reply = self.reply = Reply(sent=time.perf_counter())
        self._rest = b""
        self._is_stream = False
        try:
            await self.connect()
        except OSError as error:
            reply.error = f"connect: {error}"
            reply.ended = time.perf_counter()
            return reply
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._parser = httptools.HttpResponseParser(self)
        assert self._transport is not None
        self._transport.write(self._target.request(path, body))
        timer = loop.call_later(timeout_s, self._fail, "timeout")
        await self._done
        timer.cancel()
        reply.ended = time.perf_counter()
        return reply

    async def close(self) -> None:
        """Close the socket and wait until it is closed."""
        if self._transport is not None:
            self._transport.close()
        await self._lost.wait()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # The cast is needed because uvloop's transport does not inherit from `asyncio.Transport`.
        self._transport = cast(asyncio.Transport, transport)
        self._lost.clear()

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"malformed answer: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost.set()
        if self._done is None or self._done.done():
            return
        # An HTTP/1.0 answer without length or chunks ends with the connection.
        is_whole = exc is None and self.reply.status and "content-length" not in self.reply.headers
        if is_whole and "transfer-encoding" not in self.reply.headers:
            self.on_message_complete()
        else:
            self._fail(f"connection lost: {exc or 'closed before the answer was complete'}")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.reply.status = self._parser.get_status_code()
        self._is_stream = self.reply.headers.get("content-type", "").startswith("text/event-stream")

    def on_body(self, body: bytes) -> None:
        if not self._is_stream:
            self.reply.body += body
            return
        now = time.perf_counter()
        *events, self._rest = (self._rest + body).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._on_event(event, now)

    def on_message_complete(self) -> None:
        if self._done is None or self._done.done():
            return
        if self._is_stream and not self.reply.is_done and not self.reply.error:
            self.reply.error = "the stream ended without [DONE]"
        if self._parser is not None and not self._parser.should_keep_alive() and self._transport is not None:
            self._transport.close()
            self._transport = None
        self._done.set_result(None)

    def _on_event(self, event: bytes, now: float) -> None:
        if not event.startswith(_DATA):
            if b"\n" + _DATA not in event:
                return  # A line without data only keeps the connection open.
            event = event[event.index(b"\n" + _DATA) + 1 :]
        data = event[len(_DATA) :].strip()
        reply = self.reply
        if data == _DONE:
            reply.is_done = True
            return
        try:
            message = _decode_event(data)
        except msgspec.MsgspecError as error:
            reply.error = f"malformed event: {error}"
            return
        if message.error is not None:
            reply.error = f"error event: {message.error}"
        if message.usage is not None:
            reply.prompt_tokens = message.usage.prompt_tokens
            reply.completion_tokens = message.usage.completion_tokens
            if message.usage.prompt_tokens_details is not None:
                reply.cached_tokens = message.usage.prompt_tokens_details.cached_tokens or 0
        for choice in message.choices:
            if text := _text_of(choice):
                reply.times.append(now)
                reply.texts.append(text)

    def _fail(self, error: str) -> None:
        if self._done is not None and not self._done.done():
            self.reply.error = error
            self._done.set_result(None)
            if self._transport is not None:
                self._transport.abort()
                self._transport = None


def _text_of(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    return choice.delta.content or choice.delta.reasoning or choice.delta.reasoning_content or ""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run like `asyncio.run`, on uvloop if it is installed. SIGTERM cancels, so that a benchmark leaves no server."""
    try:
        import uvloop
    except ImportError:
        loop_factory = None
    else:
        loop_factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(_stoppable(main))
        except asyncio.CancelledError:
            sys.exit("stopped")


async def _stoppable(main: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await main
