"""Streams over raw ASGI, as server-sent events or lines of JSON. Idle streams get keep-alives; clients that leave or
stall are detected.

Interfaces between a generation and a dialect. The dialect's encoders turn events into bytes.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from starlette.types import Receive, Send

from gateway.errors import ApiError, InternalError
from gateway.http import connection_limits
from gateway.http.bodies import CLIENT_CLOSED, SLICE_BYTES, ResponseSender, send_parts
from gateway.request.generation import Generation
from gateway.request.record import Header, RequestRecord
from protocol.from_worker import Delta, Progress


class StreamEncoder(Protocol):
    """Encoder of a request's stream. It never gets deltas that ended in ERROR or ABORT: `error` is called instead."""

    def bind(self, rids: Sequence[int]) -> None:
        """Map request ids to choices. Called before `encode`, and again if the request moves to another worker."""
        ...

    def begin(self, prompt_tokens: int) -> bytes:
        """Return the events before the first delta. `prompt_tokens` is 0 while it is unknown."""
        ...

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        """Return the events of these deltas, possibly none."""
        ...

    def keepalive(self) -> bytes:
        """Return bytes that reset a client's idle timer and have no other effect."""
        ...

    def error(self, error: ApiError) -> bytes | None:
        """Return the last event of a failed stream. None if the dialect has no such event, and the stream must be cut
        off.
        """
        ...

    def end(self) -> bytes:
        """Return the events after the last delta: usage, if requested, and the end mark."""
        ...


class Fold(Protocol):
    """Encoder of a request's whole answer, made from the deltas of which a stream would consist."""

    def bind(self, rids: Sequence[int]) -> None:
        """Map rids to choices."""
        ...

    def add(self, deltas: Sequence[Delta]) -> None:
        """Add these deltas."""
        ...

    def result(self) -> bytes:
        """Return the whole body. Called once, after every choice has finished."""
        ...


STALLS_MAX: Final = 2
EVENTS: Final = b"text/event-stream; charset=utf-8"
JSON_LINES: Final = b"application/x-ndjson"
_UNBUFFERED: Final[tuple[Header, ...]] = (
    (b"cache-control", b"no-cache"),
    # nginx does not buffer an answer with this header.
    (b"x-accel-buffering", b"no"),
)
# Encoder of the progress of a prefill as an event.
EncodeProgress = Callable[[Progress], bytes]
# Function that returns the slices in which large events are sent; None for events that are sent as they are.
SliceEvents = Callable[[bytes], Iterator[bytes] | None]
# Function that returns the parts of a whole answer with large fields of the request.
SplitAnswer = Callable[[bytes], Sequence[memoryview]]
HEADERS: Final[tuple[Header, ...]] = ((b"content-type", EVENTS), *_UNBUFFERED)


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """Timing of a stream in seconds.

    The status line waits for the first event up to `hold_s`, so that a refusal can have an error status. `keepalive_s`
    is the interval of keep-alives.
    """

    hold_s: float = 1.0
    keepalive_s: float = 10.0


DEFAULT_PACE: Final = StreamTiming()


class StreamWatch:
    """Context that cancels its task when the client leaves, or reads nothing for `write_timeout_s`.

    uvicorn's `send` returns silently after a disconnect, so `receive` is watched. The context swallows only its own
    cancellation; `reason` says why it cancelled.
    """

    def __init__(self, receive: Receive, write_timeout_s: float | None = None) -> None:
        self.reason: str | None = None
        self._receive = receive
        self._write_timeout_s = connection_limits.WRITE_TIMEOUT_S if write_timeout_s is None else write_timeout_s
        # True while the task is in `send`, which blocks if the client does not read.
        self.is_sending = False
        self.sent = 0
        # True once everything was sent. A disconnect that is reported afterwards means nothing.
        self.is_over = False
        self._sent_before = -1
        self._stalls = 0
        self._is_active = False
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._is_active = True
        self._watcher = asyncio.create_task(self._watch())
        self._arm()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._is_active = False
        if self._timer is not None:
            self._timer.cancel()
        self._watcher.cancel()
        if self.reason is None:
            return False
        return self._task.uncancel() == 0 and kind is asyncio.CancelledError

    async def write(self, send: Send, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the body; the watch notices if the client does not read it."""
        self.is_sending = True
        await send({"type": "http.response.body", "body": data, "more_body": more})
        self.is_sending = False
        self.sent += 1
        self.is_over = not more

    async def _watch(self) -> None:
        # What is left of the request's body is dropped.
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cut("disconnect")

    def _arm(self) -> None:
        # The stream has one timer instead of one per event. If two checks in a row find the same `send` still running,
        # it has blocked for at least the limit.
        self._timer = self._loop.call_later(self._write_timeout_s / 2, self._check)

    def _check(self) -> None:
        is_same = self.is_sending and self.sent == self._sent_before
        self._stalls = self._stalls + 1 if is_same else 0
        self._sent_before = self.sent if self.is_sending else -1
        if self._stalls == STALLS_MAX:
            self._cut("write_timeout")
        else:
            self._arm()

    def _cut(self, reason: str) -> None:
        if self._is_active and not self.is_over and self.reason is None:
            self.reason = reason
            self._task.cancel()


class _ResponseStream:
    """One response that is being written."""

    def __init__(
        self,
        generation: Generation,
        encoder: StreamEncoder,
        send: Send,
        watch: StreamWatch,
        pace: StreamTiming,
        kind: bytes,
        on_progress: EncodeProgress | None,
        slice_events: SliceEvents | None,
    ) -> None:
        self._generation = generation
        generation.wakes_on_progress = on_progress is not None
        self._on_progress = on_progress
        self._slice_events = slice_events
        self._encoder = encoder
        self._send = send
        self._watch = watch
        self._writer = generation.record.writer
        self._kind = kind
        self._loop = asyncio.get_running_loop()
        self._keepalive_s = pace.keepalive_s
        self._hold_until = self._loop.time() + pace.hold_s
        self._is_started = False
        # Events of more than a slice, which `send` writes when the client takes them.
        self._large = b""

    async def run(self) -> ApiError | None:
        """Write the whole stream.

        Raises `ApiError` if nothing was written yet; returns an error that was sent in the stream. An internal error is
        raised after its event was sent: without the event, the stream could look complete.
        """
        try:
            while not self._generation.is_done:
                if not self._generation.is_open:
                    await self._open()
                await self._flow()
        except ApiError as error:
            if not self._is_started:
                raise
            await self._end_with(error)
            return error
        except Exception:  # The exception is raised again after the stream's last event.
            if self._is_started and not self._watch.is_over:
                await self._end_with(InternalError())
            raise
        return None

    async def _end_with(self, error: ApiError) -> None:
        last = self._encoder.error(error)
        if last is not None:
            await self._write(last, more=False)

    async def _open(self) -> None:
        """Open the generation. While this waits for the model to load, send keep-alives to the client."""
        if self._generation.open_now():
            return
        opening = asyncio.create_task(self._generation.open())
        try:
            while not (await asyncio.wait({opening}, timeout=self._read_timeout_s()))[0]:
                await self._write(self._encoder.keepalive() if self._is_started else b"")
            opening.result()
        finally:
            opening.cancel()

    async def _flow(self) -> None:
        """Write new text until something else happens. Every token passes through this loop."""
        generation, encode, watch = self._generation, self._encoder.encode, self._watch
        while True:
            on_unread = self._on_unread if self._is_started and self._writer is not None else None
            deltas = await generation.read(self._read_timeout_s(), on_unread)
            data = self._take_large() + encode(deltas)
            if not (data and self._is_started) or generation.accounting.ended or len(data) > SLICE_BYTES:
                break
            await watch.write(self._send, data)
        await self._turn(data, is_silent=not deltas)

    def _on_unread(self) -> bool:
        """Write unread deltas without waking this task.

        Returns False, and writes nothing, if the client cannot take more now, or all of it at once.
        """
        writer = self._writer
        if writer is None or not writer.is_open:
            return False
        data = self._encoder.encode(self._generation.read_now())
        if len(data) > SLICE_BYTES:
            self._large = data
            return False
        if data:
            writer.write(data)
        return True

    def _take_large(self) -> bytes:
        data, self._large = self._large, b""
        return data

    async def _turn(self, data: bytes, is_silent: bool) -> None:
        """Handle what has ended the loop of `_flow`: the beginning or end of a sequence, a failure, or silence."""
        generation = self._generation
        if self._on_progress is not None and (progress := generation.collector.read_progress()) is not None:
            data = self._on_progress(progress) + data
        if (failure := generation.accounting.failure) is not None:
            # A failure before the first byte becomes an error status; a later failure follows the text generated so
            # far.
            if data and self._is_started:
                await self._write(data)
            raise failure
        if generation.is_done:
            await generation.compare()
            await self._write(data + self._encoder.end(), more=False)
        elif data or (is_silent and generation.is_open and not self._is_started):
            await self._write(data)
        elif is_silent and generation.is_open and generation.shows_life():
            # No keep-alive is sent while the worker makes no progress, so that the client can time out.
            await self._write(self._encoder.keepalive())

    def _read_timeout_s(self) -> float:
        return self._keepalive_s if self._is_started else max(0.0, self._hold_until - self._loop.time())

    async def _write(self, data: bytes, more: bool = True) -> None:
        if not self._is_started:
            await self._generation.compare()
            self._is_started = True
            headers = [(b"content-type", self._kind), *_UNBUFFERED, *self._generation.headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            data = self._encoder.begin(self._generation.prompt_tokens) + data
            if not data and more:
                # Clients that read events do not reset their idle timer when only headers arrive.
                data = self._encoder.keepalive()
            # No middleware inspects the body, so events need not pass through the wrapper.
            if isinstance(self._send, ResponseSender):
                self._send = self._send.inner
        if self._slice_events is not None and (pieces := self._slice_events(data)) is not None:
            for piece in pieces:
                await self._watch.write(self._send, piece)
                # `send` waits only for a client that reads slowly: others get their turn between any two slices.
                await asyncio.sleep(0)
            data = b""
        if data or not more:
            await self._watch.write(self._send, data, more=more)


async def respond_stream(
    generation: Generation,
    encoder: StreamEncoder,
    receive: Receive,
    send: Send,
    pace: StreamTiming = DEFAULT_PACE,
    kind: bytes = EVENTS,
    on_progress: EncodeProgress | None = None,
    slice_events: SliceEvents | None = None,
) -> ApiError | None:
    """Answer with the events of `generation`, as a stream of the content type `kind`. `on_progress` makes an event of
    each progress of the prefill; without it there are none. `slice_events` slices the events that may be large: those
    at the beginning and the end, and of whole items.

    Raises `ApiError` only before the status is sent; returns a later error.
    """
    error: ApiError | None = None
    record = generation.record
    async with cut_off(record, receive) as watch:
        # The stream runs in a separate task, so that each token wakes a few frames instead of the whole app.
        stream = _ResponseStream(generation, encoder, send, watch, pace, kind, on_progress, slice_events)
        error = await asyncio.create_task(stream.run())
        if error is not None:
            record.outcome = error.code or "error"
    return error


async def respond_whole(
    generation: Generation, fold: Fold, receive: Receive, send: Send, split_answer: SplitAnswer | None = None
) -> None:
    """Answer with one whole body. `split_answer` returns its parts if the result of `fold` is not all of it.

    Raises `ApiError`.
    """
    async with cut_off(generation.record, receive):
        result = await folded(generation, fold)
        parts = [memoryview(result)] if split_answer is None else split_answer(result)
        await send_parts(send, 200, parts, generation.headers)


async def folded(generation: Generation, fold: Fold) -> bytes:
    """Fold all events of `generation` into one answer. Raises `ApiError`."""

    def on_unread() -> bool:
        fold.add(generation.read_now())
        return True

    while not generation.is_done:
        if not generation.is_open and not generation.open_now():
            await generation.open()
        fold.add(await generation.read(on_unread=on_unread))
        if generation.accounting.failure is not None:
            raise generation.accounting.failure
    await generation.compare()
    return fold.result()


@asynccontextmanager
async def cut_off(record: RequestRecord, receive: Receive) -> AsyncGenerator[StreamWatch]:
    """Cancel the block if its client leaves or stalls, record the cause, and continue after the block."""
    async with StreamWatch(receive) as watch:
        yield watch
    if watch.reason is not None:
        note_cut(record, watch.reason)


def note_cut(record: RequestRecord, reason: str) -> None:
    """Record that the client left or stalled."""
    record.outcome = reason
    record.status = record.status or CLIENT_CLOSED
