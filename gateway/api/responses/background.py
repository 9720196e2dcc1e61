"""Background responses. A separate task generates each of them, and clients retrieve them by id.

Log of a background response's events, for clients that reconnect and read the events that they missed.
"""

import asyncio
import dataclasses
import logging
from array import array
from asyncio import shield, wrap_future
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, Final, NamedTuple

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.api.common.request_fields import ExtrasSpec, extras_of, no_extras
from gateway.api.common.serve import PreparedRequest
from gateway.api.responses import response as out
from gateway.api.responses.encoder import QueuedStream, ResponseRun, large_values, pieces
from gateway.api.responses.journal import DeltaRecord, JournaledRequest, ResponseJournal, ResponseJournals, StartRecord
from gateway.api.responses.store import Store, StoreBroken, done
from gateway.errors import ApiError, BadRequest, Cancelled, Overloaded, Unavailable
from gateway.http.bodies import READER_BYTES, reserve
from gateway.http.direct_write import writer_of
from gateway.http.sse import DEFAULT_PACE, HEADERS, StreamWatch, note_cut
from gateway.request.admission import POLL_S, BatchGate
from gateway.request.generation import Generation
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services
from protocol.codec import prompt_bytes
from protocol.from_worker import Delta

log = logging.getLogger(__name__)

# Maximum size of one response's log, about 40,000 tokens. When it is reached, the older half is dropped.
LOG_BYTES_MAX: Final = 8 * 1024 * 1024
# Maximum size of one read, which copies the bytes for its reader.
READ_BYTES_MAX: Final = 64 * 1024
_END: Final = b"\n\n"


class EventsGone(Exception):
    """Raised when events that a reader has not read yet were dropped."""


class ReaderPosition(NamedTuple):
    """Position of a reader: its next event, and how many bytes of that event it has read."""

    number: int
    offset: int = 0


class _Gap(NamedTuple):
    """Position in the stored bytes where a field was left out, and the number of the field."""

    at: int
    field: int


class EventLog:
    """Log of events in order, numbered from 0, with one writer and any number of readers.

    Two flat buffers hold the events' bytes and the offset where each event ends, so there is no object per event. Some
    events repeat ("echo") fields of the request, which can be most of a large body. Such events come with gaps, and the
    log has one copy of each field for all of them.
    """

    def __init__(self, max_bytes: int = LOG_BYTES_MAX, echo: Mapping[int, memoryview] | None = None) -> None:
        """`echo` has the encoded large fields by the numbers of their gaps."""
        self._max_bytes = max_bytes
        self._echo = echo or {}
        self.echo_bytes = sum(map(len, self._echo.values()))
        self._gaps: list[_Gap] = []
        self._data = bytearray()
        # Offsets in `_data` where the events end. The first event has the number `_first`.
        self._ends = array("Q")
        self._first = 0
        self._new_events: asyncio.Future[None] | None = None
        self.is_over = False

    @property
    def size_bytes(self) -> int:
        return len(self._data) + self._ends.itemsize * len(self._ends)

    def add(self, data: bytes) -> None:
        """Append whole events, or none if `data` is empty, and wake the readers."""
        if not data:
            return
        place = len(self._data)
        for piece in pieces(data):
            if isinstance(piece, int):
                self._gaps.append(_Gap(len(self._data), piece))
            else:
                self._data += piece
        while place < len(self._data):
            place = self._data.index(_END, place) + len(_END)
            self._ends.append(place)
        if len(self._data) > self._max_bytes:
            self._drop_older_half()
        self._wake()

    def skip(self, number: int) -> None:
        """Drop all events, and number the next one `number`."""
        self._data.clear()
        self._gaps.clear()
        self._ends = array("Q")
        self._first = number

    def close(self) -> None:
        """End the log: no more events follow."""
        self.is_over = True
        self._wake()

    def check(self, place: ReaderPosition) -> None:
        """Raises `EventsGone` if the reader's next event was dropped."""
        if place.number < self._first:
            raise EventsGone

    async def read(self, place: ReaderPosition, timeout_s: float) -> tuple[bytes, ReaderPosition]:
        """Return the events that follow `place`, and the position after them.

        Returns no bytes on timeout and at the end of the log. Only an event that is larger than a read comes in pieces.
        Raises `EventsGone` if the reader is too slow.
        """
        self.check(place)
        if place.number - self._first >= len(self._ends) and not self.is_over:
            await self._wait(timeout_s)
            self.check(place)
        index = place.number - self._first
        if index >= len(self._ends):
            return b"", place
        begin = self._begin(index)
        behind = self._whole_events(index, begin)
        if place.offset or behind == index:
            return self._piece(index, place)
        return bytes(self._data[begin : self._ends[behind - 1]]), ReaderPosition(self._first + behind)

    def _begin(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def _whole_events(self, index: int, begin: int) -> int:
        """Return the index after the last whole event that fits into one read and has no gap; `index` if
        there is none.
        """
        end = begin + READ_BYTES_MAX
        if gap := self._gaps_of(begin, end)[:1]:
            end = gap[0].at
        return bisect_right(self._ends, end, index)

    def _piece(self, index: int, place: ReaderPosition) -> tuple[bytes, ReaderPosition]:
        """Return the next bytes of one event."""
        skipped = place.offset
        parts = self._parts(index)
        while skipped >= (size := parts[0][2] - parts[0][1]):
            skipped -= size
            del parts[0]
        source, begin, end = parts[0]
        begin += skipped
        piece = bytes(source[begin : min(end, begin + READ_BYTES_MAX)])
        is_whole = len(parts) == 1 and begin + len(piece) == end
        if is_whole:
            return piece, ReaderPosition(place.number + 1)
        return piece, place._replace(offset=place.offset + len(piece))

    def _parts(self, index: int) -> list[tuple[bytearray | memoryview, int, int]]:
        """Return the slices of `_data` and the fields that make up an event."""
        begin, end = self._begin(index), self._ends[index]
        parts: list[tuple[bytearray | memoryview, int, int]] = []
        for gap in self._gaps_of(begin, end):
            field = self._echo[gap.field]
            parts += [(self._data, begin, gap.at), (field, 0, len(field))]
            begin = gap.at
        return [*parts, (self._data, begin, end)]

    def _gaps_of(self, begin: int, end: int) -> list[_Gap]:
        """Return the gaps between two positions in the stored bytes."""
        return [gap for gap in self._gaps if begin <= gap.at < end]

    async def _wait(self, timeout_s: float) -> None:
        if self._new_events is None:
            self._new_events = asyncio.get_running_loop().create_future()
        # All readers share the future, so a timeout must not cancel it.
        await asyncio.wait({self._new_events}, timeout=timeout_s)

    def _wake(self) -> None:
        if self._new_events is not None:
            self._new_events.set_result(None)
            self._new_events = None

    def _drop_older_half(self) -> None:
        """Drop the older half of the events, at least one if there are two. The newest event stays, however large it
        is.
        """
        count = min(max(1, bisect_left(self._ends, len(self._data) // 2)), len(self._ends) - 1)
        if count <= 0:
            return
        cut = self._ends[count - 1]
        del self._data[:cut]
        self._gaps = [gap._replace(at=gap.at - cut) for gap in self._gaps if gap.at >= cut]
        self._ends = array("Q", [end - cut for end in self._ends[count:]])
        self._first += count


RUNNING_MAX: Final = 64
RUNNING_PER_KEY_MAX: Final = 16
RETRY_AFTER_S: Final = 5.0
# The events of an ended response are kept for this time. The total size of all such events is limited too.
KEEP_ENDED_S: Final = 600.0
ENDED_BYTES_MAX: Final = 64 * 1024 * 1024
# A running response is stored at this interval, so that most of its output survives a crash of the daemon. The whole
# response is written each time, so the interval is longer if the request is large: twice this for a request of
# CHECKPOINT_BYTES.
CHECKPOINT_S: Final = 10.0
CHECKPOINT_BYTES: Final = 1024 * 1024
# A cancelled or failed state is sent once it is stored, or after this time.
STORE_TIMEOUT_S: Final = 2.0
# Delay after which a last state that could not be stored is stored again.
STORE_RETRY_S: Final = 5.0
EVENTS_GONE_MESSAGE: Final = (
    "The events that you ask for are no longer kept: retrieve the response whole, without 'stream', and go on "
    "from there."
)
# Approximate memory of a response, without its events and its request.
_OBJECT_BYTES: Final = 16 * 1024
_KEEPALIVE: Final = b": keep-alive\n\n"


class Background:
    """One response, from its request until its events are dropped. Its task changes it; clients only read it.

    `journal` is set before the task runs. `is_left` is set once the response has ended here and the next daemon is to
    resume it.
    """

    journal: ResponseJournal

    def __init__(self, tenant: str, run: ResponseRun, stored: Callable[[], Awaitable[None]]) -> None:
        """`stored` returns once all states that were kept before are stored."""
        self.tenant = tenant
        self.run = run
        self._stored = stored
        self.events = EventLog(echo=large_values(run.response))
        self.encoder = QueuedStream(run)
        self.is_over = False
        self.is_left = False
        # The generation is dropped when the response has ended, because it keeps the packed prompt with its media in
        # memory.
        self._generation: Generation | None = None

    @property
    def id(self) -> str:
        return self.run.response.id

    @property
    def size_bytes(self) -> int:
        """Approximate memory of the ended response, including the fields of the request that the response repeats."""
        return self.events.size_bytes + self.run.request_bytes + _OBJECT_BYTES

    def release(self) -> None:
        """Drop the generation, which only a running response needs."""
        self._generation = None

    async def state(self) -> out.Response:
        """Return the current state. A last state is returned once it is stored, so that every later daemon has it."""
        if not self.is_over and (self.run.last is not None or self.run.is_cancelled):
            await self._stored()
        return self.run.snapshot()

    def cancel(self) -> None:
        """Cancel the response, and store its new state."""
        if self.is_over or self.run.last is not None:
            return
        if self._generation is not None:
            self._generation.cancel()
        # If this daemon is killed before the sequence has ended, the next one must not resume the response.
        self.run.keep(self.run.cancel())

    def leave(self) -> None:
        """End the response here so that the next daemon resumes it, provided that the journal is complete."""
        if not self.is_over and self.journal.is_sound and not self.run.is_cancelled:
            self.is_left = True
            if self._generation is not None:
                self._generation.leave()

    async def generate(self, generation: Generation, is_ending: Callable[[], bool], gate: BatchGate) -> None:
        """Generate the whole response. However the generation ends, the last event is written and the last state
        stored.

        If the daemon itself is ending, the response is left to the next daemon instead.
        """
        self._generation = generation
        try:
            await self._wait_for_turn(generation, gate)
            await self._generate(generation)
        except ApiError as error:
            if is_ending() and not self.is_left:
                self.leave()
            generation.record.outcome = "left" if self.is_left else error.outcome
            await self.fail(error)
        except BaseException as error:  # The exception is raised again after the last event.
            is_end = isinstance(error, asyncio.CancelledError)
            if is_end:
                self.leave()
            await self.fail(Unavailable("The server stopped.") if is_end else ApiError(500, "Internal error."))
            raise
        finally:
            self._end()

    async def complete(self) -> None:
        """Write the last event of a response whose tokens are complete."""
        await self.journal.wait_published()
        last = self.encoder.end()
        if self.run.is_cancelled:
            await self._stored()
        self.events.add(last)
        self._end()

    async def fail(self, error: ApiError) -> None:
        """End the response with an error.

        If it is left to the next daemon, its clients are cut off instead, and reconnect there.
        """
        if self.is_left:
            await self.journal.leave()
        else:
            await self.journal.wait_published()
            last = self.encoder.error(error)
            # The journal does not have the error: the next daemon would resume the response.
            await self._stored()
            self.events.add(last)
        self._end()

    def _end(self) -> None:
        self.is_over = True
        self.events.close()

    async def _wait_for_turn(self, generation: Generation, gate: BatchGate) -> None:
        """Wait until nothing else runs, if the client has asked for a window of hours."""
        record = generation.record
        if not record.is_of_batch_class:
            return
        while not generation.opener.is_late and not await gate.admits(record.model or ""):
            self.check()
            await asyncio.sleep(POLL_S)
        self.check()

    async def _generate(self, generation: Generation) -> None:
        if not generation.open_now():
            self.check()
            await generation.open()
        if self.run.response.status == "queued":
            self.journal.append(StartRecord(), self.encoder.started())

        loop = asyncio.get_running_loop()
        interval_s = CHECKPOINT_S * (1 + generation.record.body_bytes // CHECKPOINT_BYTES)
        due = loop.time() + interval_s

        def write_unread() -> bool:
            if loop.time() >= due:
                return False
            self._write(generation, generation.read_now())
            return True

        while not generation.is_done:
            self._write(generation, await generation.read(CHECKPOINT_S, write_unread))
            if generation.accounting.failure is not None:
                raise generation.accounting.failure
            if loop.time() >= due and not generation.is_done:
                self.run.keep(self.run.snapshot())
                due = loop.time() + interval_s
        await generation.compare()
        await self.complete()

    def _write(self, generation: Generation, deltas: list[Delta]) -> None:
        if deltas:
            self.journal.append(DeltaRecord(deltas, generation.collector.truncated), self.encoder.encode(deltas))

    def check(self) -> None:
        """Raises `ApiError` if the response was cancelled or left before its generation began."""
        if self.run.is_cancelled:
            raise Cancelled
        if self.is_left:
            raise Unavailable("The server stopped.")

    async def answer(self, after: int, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream the events after event number `after`, up to the last. If the client leaves, the response continues.

        Raises `BadRequest` and `Unavailable` before the first byte.
        """
        record, place, writer = record_of(scope), ReaderPosition(after + 1), writer_of(scope)
        try:
            self.events.check(place)
        except EventsGone:
            raise BadRequest(EVENTS_GONE_MESSAGE, "starting_after", "events_gone") from None
        await reserve(record, READER_BYTES)
        async with StreamWatch(receive) as watch:
            await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *record.headers]})
            more = True
            while more:
                data, place, more = await self._next_bytes(place)
                if not (data or more) and (self.is_left or place.offset):
                    watch.is_over = True
                    break
                if writer is not None:
                    writer.is_within_event |= place.offset > 0
                watch.is_sending = True
                await send({"type": "http.response.body", "body": data, "more_body": more})
                watch.is_sending = False
                watch.sent += 1
                watch.is_over = not more
                if writer is not None:
                    writer.is_within_event = place.offset > 0
        if watch.reason is not None:
            note_cut(record, watch.reason)
        elif self.is_left or place.offset:
            record.outcome = "left" if self.is_left else "events_gone"
            if writer is not None:
                writer.cut_off()

    async def _next_bytes(self, place: ReaderPosition) -> tuple[bytes, ReaderPosition, bool]:
        """Return the next bytes to send, the position after them, and whether more follow.

        The bytes may end in the middle of an event.
        """
        events = self.events
        try:
            data, place = await events.read(place, DEFAULT_PACE.keepalive_s)
        except EventsGone:
            last = b"" if place.offset else out.error_bytes("events_gone", EVENTS_GONE_MESSAGE, place.number)
            return last, place, False
        if data:
            return data, place, True
        return (b"", place, False) if events.is_over else (_KEEPALIVE, place, True)


class Backgrounds:
    """Background responses that run or ended recently. Used on the event loop only."""

    def __init__(self, services: Services, store: Store, journals: ResponseJournals) -> None:
        self._services = services
        self._store = store
        self._journals = journals
        # Responses by id, in the order of their requests.
        self._known: dict[str, Background] = {}

    def find(self, tenant: str, response_id: str) -> Background | None:
        """Return the tenant's response with this id; None if it does not run and has not ended recently."""
        background = self._known.get(response_id)
        return background if background is not None and background.tenant == tenant else None

    def is_running(self, response_id: str) -> bool:
        """Whether a response with this id is being generated."""
        background = self._known.get(response_id)
        return background is not None and not background.is_over

    def start(self, run: ResponseRun, job: PreparedRequest, tenant: str, request: JournaledRequest) -> Background:
        """Start a response. Raises `ApiError` if there is no room for it; later errors are sent as events."""
        running = [each for each in self._known.values() if not each.is_over]
        if len(running) >= RUNNING_MAX or sum(each.tenant == tenant for each in running) >= RUNNING_PER_KEY_MAX:
            raise Overloaded("Too many background responses are being generated. Try again later.", RETRY_AFTER_S)
        record = job.record.detached(self._services.bodies.lease(), self._services.media.lease())
        if run.extras is not no_extras:
            run.extras = extras_of(ExtrasSpec(timing=True), record)
        with ExitStack() as held:
            assert record.lease is not None
            assert record.media_lease is not None
            held.callback(record.lease.close)
            held.callback(record.media_lease.close)
            generation = held.enter_context(dataclasses.replace(job, record=record).generation(run.bind))
            background = Background(tenant, run, self.stored)
            size = prompt_bytes(request.generate) + record.body_bytes
            background.journal = self._journals.create(background.id, request, size, background.events.add)
            background.journal.append(None, background.encoder.queued())
            # The response is stored now, so that the next daemon finds it if this daemon ends early.
            run.keep(run.snapshot())
            leases = held.pop_all()
        self.register(background, self.run(background, generation, leases))
        return background

    def register(self, background: Background, work: Coroutine[Any, Any, None]) -> None:
        """Add a response to the registry, and start its task."""
        self._known[background.id] = background
        self._services.tasks.start(work, f"background response {background.id}")

    async def stored(self) -> None:
        """Return once all states that were kept before are stored, after at most STORE_TIMEOUT_S."""
        with suppress(StoreBroken, TimeoutError):
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._store.wait_stored()

    def leave(self) -> None:
        """Leave all running responses to the next daemon immediately."""
        for background in self._known.values():
            background.leave()

    def drop_revoked(self, owners: frozenset[str]) -> None:
        """Drop the responses of tenants that are not among `owners`; those that run are cancelled and not stored."""
        for background in [each for each in self._known.values() if each.tenant not in owners]:
            self._services.tasks.start(self.forget(background), f"the end of {background.id}")

    async def forget(self, background: Background) -> None:
        """Drop a response with its events. A running response is cancelled and not stored."""
        background.run.keep = keep_nothing
        if not background.is_over:
            background.cancel()
        await background.journal.remove()
        self._known.pop(background.id, None)

    async def run(self, background: Background, generation: Generation, leases: ExitStack) -> None:
        """Generate a response to its end, then release it."""
        try:
            with leases:
                services = self._services
                await background.generate(generation, lambda: services.admission.is_draining, services.batch_gate)
        finally:
            self._log_end(background, generation.record)
            await self.end(background)

    async def end(self, background: Background) -> None:
        """Release a response that has ended, and drop its events after a while.

        The journal is deleted only when the store has the last state. If this daemon ends before, the next finds it.
        """
        background.release()
        self._evict()
        asyncio.get_running_loop().call_later(KEEP_ENDED_S, self._known.pop, background.id, None)
        run = background.run
        if not background.is_left:
            # The end of this task must not cancel a write that waits for the store's thread.
            while run.last is not None and run.kept is not None and not await shield(wrap_future(run.kept)):
                await asyncio.sleep(STORE_RETRY_S)
                run.kept = run.keep(run.last)
            await background.journal.remove()
        run.keep = keep_nothing

    def _log_end(self, background: Background, record: RequestRecord) -> None:
        """Write the log line and the trace of the generation, which goes on after the client's request has ended."""
        tracer = self._services.tracer
        trace_id = tracer.export(record) if tracer is not None else ""
        fields: dict[str, object] = {
            "request": record.id,
            "response": background.id,
            "model": record.model,
            "ms": round((record.clock() - record.started) * 1000, 1),
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "outcome": record.outcome or "ok",
        }
        if record.caller.key is not None:
            fields["key"] = record.caller.key
        if trace_id:
            fields["trace"] = trace_id
        log.info("background response ended", extra={"fields": fields})

    def _evict(self) -> None:
        """Drop ended responses until those left take at most ENDED_BYTES_MAX: each time the oldest one of the tenant
        whose responses take most.
        """
        ended: dict[str, list[Background]] = {}
        sizes: Counter[str] = Counter()
        for each in self._known.values():
            if each.is_over:
                ended.setdefault(each.tenant, []).append(each)
                sizes[each.tenant] += each.size_bytes
        while sizes.total() > ENDED_BYTES_MAX:
            ((tenant, _),) = sizes.most_common(1)
            oldest = ended[tenant].pop(0)
            sizes[tenant] -= oldest.size_bytes
            del self._known[oldest.id]


def keep_nothing(last: out.Response) -> Future[bool]:
    """Store nothing. Used in place of the store for a response that is not stored, was deleted, or has ended."""
    return done(True)


def failed_by_restart(body: bytes) -> bytes:
    """Return the JSON of a stored response whose daemon ended before it, marked as failed, with the output so far."""
    fields: dict[str, object] = msgspec.json.decode(body)
    message = (
        "The server was restarted while it was generating this response. Its output is what had been kept by then."
    )
    error = out.ErrorInfo("server_error", message)
    return msgspec.json.encode(fields | {"status": "failed", "error": error})
