"""Background responses. A separate task generates each of them, and clients retrieve them by id."""

import asyncio
import dataclasses
import logging
from asyncio import shield, wrap_future
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, Final

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.api.common.extras import ExtrasSpec, extras_of, no_extras
from gateway.api.common.serve import PreparedRequest
from gateway.api.responses import response as out
from gateway.api.responses.echo import large_values
from gateway.api.responses.encoder import QueuedStream, ResponseRun
from gateway.api.responses.event_log import EventLog, EventsGone, ReaderPosition
from gateway.api.responses.journal import ResponseJournal, ResponseJournals
from gateway.api.responses.journal_records import DeltaRecord, JournaledRequest, StartRecord
from gateway.api.responses.store import Store, StoreBroken, done
from gateway.errors import ApiError, BadRequest, Cancelled, Overloaded, Unavailable
from gateway.http.direct_write import writer_of
from gateway.http.request_body import reserve
from gateway.http.shared_answers import READER_BYTES
from gateway.http.sse import DEFAULT_PACE, HEADERS, StreamWatch, note_cut
from gateway.request.batch_gate import POLL_S, BatchGate
from gateway.request.generation import Generation
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services
from protocol.codec import prompt_bytes
from protocol.from_worker import Delta

log = logging.getLogger(__name__)

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
        await self.journal.settle()
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
            await self.journal.settle()
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
        while not generation.is_late and not await gate.admits(record.model or ""):
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
            if generation.failure is not None:
                raise generation.failure
            if loop.time() >= due and not generation.is_done:
                self.run.keep(self.run.snapshot())
                due = loop.time() + interval_s
        await generation.compare()
        await self.complete()

    def _write(self, generation: Generation, deltas: list[Delta]) -> None:
        if deltas:
            self.journal.append(DeltaRecord(deltas, generation.left_out), self.encoder.encode(deltas))

    def check(self) -> None:
        """Raises `ApiError` if the response was cancelled or left before its generation began."""
        if self.run.is_cancelled:
            raise Cancelled
        if self.is_left:
            raise Unavailable("The server stopped.")

    async def answer(self, after: int, scope: Scope, receive: Receive, send: Send, write_timeout_s: float) -> None:
        """Stream the events after event number `after`, up to the last. If the client leaves, the response continues.

        Raises `BadRequest` and `Unavailable` before the first byte.
        """
        record, place, writer = record_of(scope), ReaderPosition(after + 1), writer_of(scope)
        try:
            self.events.check(place)
        except EventsGone:
            raise BadRequest(EVENTS_GONE_MESSAGE, "starting_after", "events_gone") from None
        await reserve(record, READER_BYTES)
        async with StreamWatch(receive, write_timeout_s) as watch:
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
                await self._store.settle()

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
