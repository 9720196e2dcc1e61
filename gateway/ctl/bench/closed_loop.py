"""Parts that benchmarks share: a client for streams, a closed loop of requests, prompts and percentiles.

A closed loop of streaming requests: each client sends its next request as soon as it has an answer.

Invented words, and prompts made of them. Deterministic: the same seed gives the same text everywhere.

Percentiles, their summaries, and plain tables.

A small HTTP/1.1 client for streams. It uses so little CPU time that it can share two cores with the server it
measures.

One `BenchConnection` carries one request at a time. Everything that happens per event happens in the socket's callback:
no task is woken before the answer is complete. A general client costs as much per token as the gateway that it
measures.
"""

import asyncio
import math
import random
import signal
import ssl
import statistics
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, TypeVar, cast

import httptools
import msgspec

_ONSETS: Final = (
    "b", "br", "c", "ch", "d", "dr", "f", "g", "gl", "h", "j", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "tr",
    "v", "w", "z",
)  # fmt: skip
_VOWELS: Final = ("a", "e", "i", "o", "u", "ai", "ea", "io", "ou")
_CODAS: Final = ("", "", "", "l", "n", "r", "s", "t", "nd", "st")
_WORDS: Final = 6000
# Approximate number of tokens that a common model's vocabulary needs for one invented word.
TOKENS_PER_WORD: Final = 1.5


def vocabulary() -> list[str]:
    """Generate the invented words, commonest first."""
    source = random.Random(1)
    seen: dict[str, None] = {}
    while len(seen) < _WORDS:
        syllables = source.choices((1, 2, 3), weights=(2, 5, 3))[0]
        word = "".join(
            source.choice(_ONSETS) + source.choice(_VOWELS) + source.choice(_CODAS) for _ in range(syllables)
        )
        seen[word] = None
    return list(seen)


class Prompts:
    """Makes prompts of about a given number of tokens. No two prompts share a prefix, so no prefix cache helps."""

    def __init__(self, seed: int, tokens_per_word: float = TOKENS_PER_WORD) -> None:
        # The seed is text: Python seeds with an integer's absolute value, so -1 would give the prompts of 1.
        self.random = random.Random(str(seed))
        self.words = vocabulary()
        self._tokens_per_word = tokens_per_word

    def make(self, tokens: int) -> str:
        """Make one prompt of about `tokens` tokens, using `tokens_per_word`."""
        return " ".join(self.random.choices(self.words, k=max(1, round(tokens / self._tokens_per_word))))


class Summary(msgspec.Struct, frozen=True):
    """A distribution in milliseconds. An empty one is all zeros, never NaN."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile, which is always one of `values`. Raises ValueError if `values` is empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = max(1, math.ceil(percent / 100 * len(ordered)))
    return ordered[rank - 1]


def summarize_ms(seconds: Sequence[float]) -> Summary:
    """Summarize durations in seconds as milliseconds."""
    if not seconds:
        return Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    marks = (round(percentile(seconds, percent) * 1000, 3) for percent in (50, 90, 99, 100))
    return Summary(len(seconds), round(statistics.fmean(seconds) * 1000, 3), *marks)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )


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


CHAT: Final = "chat"
COMPLETION: Final = "completion"
EMBEDDING: Final = "embedding"
_PATHS: Final = {CHAT: "/v1/chat/completions", COMPLETION: "/v1/completions", EMBEDDING: "/v1/embeddings"}


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a benchmark."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class BenchLoad:
    """Settings that all requests of a benchmark have in common. `extra` is added to each request's body unchanged."""

    target: Target
    model: str
    endpoint: str = COMPLETION
    extra: dict[str, Any] | None = None
    timeout_s: float = 600.0

    @property
    def path(self) -> str:
        return _PATHS[self.endpoint]

    def body(self, job: BenchRequest) -> bytes:
        """Encode one streaming greedy request, or one request to embed a text, as JSON."""
        if self.endpoint == EMBEDDING:
            body = {"model": self.model, "input": job.prompt, "encoding_format": "base64"}
            return msgspec.json.encode(body | (self.extra or {}))
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": job.prompt}]} if self.endpoint == CHAT else {"prompt": job.prompt}
        )
        fixed = {"model": self.model, "max_tokens": job.max_tokens, "temperature": 0, "stream": True}
        return msgspec.json.encode(prompt | fixed | {"stream_options": {"include_usage": True}} | (self.extra or {}))


class Report(msgspec.Struct, frozen=True):
    """Result of one measurement. `tokens_per_s` divides the output tokens, as the server reports them, by the wall
    time. Embeddings have no output, so their prompt tokens are counted instead.
    """

    concurrency: int
    requests: int
    errors: int
    wall_s: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    tokens_per_s: float
    requests_per_s: float
    ttft_ms: Summary
    itl_ms: Summary
    e2e_ms: Summary
    events_per_token: float
    first_errors: list[str]


async def closed_loop(load: BenchLoad, jobs: Sequence[BenchRequest], concurrency: int) -> tuple[float, list[Reply]]:
    """Send all `jobs` and return the time from the first request to the last answer, and the replies in order."""
    replies: list[Reply | None] = [None] * len(jobs)
    bodies = [load.body(job) for job in jobs]
    todo = iter(range(len(jobs)))
    connections = [BenchConnection(load.target) for _ in range(min(concurrency, len(jobs)))]

    async def client(connection: BenchConnection) -> None:
        for at in todo:
            reply = replies[at] = await connection.request(load.path, bodies[at], load.timeout_s)
            if load.endpoint == EMBEDDING and reply.ok:
                reply.prompt_tokens = _prompt_tokens(reply.body)

    start = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(client(connection))
    wall_s = time.perf_counter() - start
    for connection in connections:
        await connection.close()
    return wall_s, [reply for reply in replies if reply is not None]


async def sweep(
    load: BenchLoad, concurrencies: Sequence[int], jobs: Callable[[int], Sequence[BenchRequest]]
) -> list[Report]:
    """Run `closed_loop` once for each concurrency, with the requests that `jobs` returns, and return the reports."""
    reports: list[Report] = []
    for concurrency in concurrencies:
        wall_s, replies = await closed_loop(load, jobs(concurrency), concurrency)
        reports.append(report(concurrency, wall_s, replies, load_generates=load.endpoint != EMBEDDING))
    return reports


def report(concurrency: int, wall_s: float, replies: Sequence[Reply], *, load_generates: bool = True) -> Report:
    """Summarize replies. Tokens of failed requests do not count. An inter-token time is the gap between two events with
    text.
    """
    good = [reply for reply in replies if reply.ok]
    tokens = sum(reply.completion_tokens for reply in good)
    prompt_tokens = sum(reply.prompt_tokens for reply in good)
    events = sum(len(reply.times) for reply in good)
    failures = [reply.error or f"HTTP {reply.status}: {_refusal(reply.body)}" for reply in replies if not reply.ok]
    return Report(
        concurrency=concurrency,
        requests=len(replies),
        errors=len(failures),
        wall_s=round(wall_s, 4),
        prompt_tokens=prompt_tokens,
        completion_tokens=tokens,
        cached_tokens=sum(reply.cached_tokens for reply in good),
        tokens_per_s=round((tokens if load_generates else prompt_tokens) / wall_s, 2),
        requests_per_s=round(len(good) / wall_s, 3),
        ttft_ms=summarize_ms([reply.times[0] - reply.sent for reply in good if reply.times]),
        itl_ms=summarize_ms([b - a for reply in good for a, b in pairwise(reply.times)]),
        e2e_ms=summarize_ms([reply.ended - reply.sent for reply in good]),
        events_per_token=round(events / tokens, 3) if tokens else 0.0,
        first_errors=list(dict.fromkeys(failures))[:5],
    )


def _prompt_tokens(body: bytes) -> int:
    try:
        return int(msgspec.json.decode(body)["usage"]["prompt_tokens"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return 0


def _refusal(body: bytes) -> str:
    """Return the message of an error body, or the beginning of a body without one."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        return body[:200].decode(errors="replace")


def as_table(reports: Sequence[Report]) -> str:
    """Format reports for people, one row for each concurrency."""
    header = (
        "clients", "requests", "errors", "tok/s", "TTFT p50", "p90", "p99", "ITL p50", "p90", "p99", "e2e p50", "p90",
        "p99 ms",
    )  # fmt: skip
    rows: list[list[str]] = []
    for report in reports:
        marks = [
            f"{mark:.1f}"
            for part in (report.ttft_ms, report.itl_ms, report.e2e_ms)
            for mark in (part.p50, part.p90, part.p99)
        ]
        rows.append(
            [str(report.concurrency), str(report.requests), str(report.errors), f"{report.tokens_per_s:.1f}", *marks]
        )
    return table(header, rows)
