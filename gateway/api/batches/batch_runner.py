"""Runner of batches: it starts their lines while nothing else runs, keeps the results, and ends the batches.

A batch that has not ended: its lines that wait, run and have ended.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from msgspec import structs
from starlette.types import ASGIApp

from gateway.access.caller import Caller
from gateway.api.batches.batch_lines import (
    FILE_PREFIX,
    InnerAnswer,
    InnerRequest,
    InputLine,
    LinePlace,
    LineProblem,
    Outcome,
    ScannedInput,
    Status,
    StoredBatch,
    StoredFile,
    new_name,
    read_line,
    scan,
    served_line,
    unserved_line,
    unsupported_field,
)
from gateway.api.batches.batch_store import ERRORS, INPUT, OUTPUT, BatchStore
from gateway.errors import ApiError, BadRequest, ModelNotFound, Unauthorized, Unsupported
from gateway.request.admission import BatchGate
from gateway.services import Services

log = logging.getLogger(__name__)

# A line whose model cannot be used so often ends with that error.
FAILURES_MAX: Final = 10
_UNREADABLE: Final = LineProblem("invalid_file", "The input file cannot be read.")


class RunningBatch:
    """Owner of a batch's lines. Used on the event loop by the runner."""

    def __init__(self, batch: StoredBatch, store: BatchStore, wall: Callable[[], float] = time.time) -> None:
        self.batch = batch
        self._store = store
        self._wall = wall
        self.is_open = False
        self._waiting: dict[str, deque[LinePlace]] = {}
        # Tasks of the lines that run, by the line's id.
        self.running: dict[str, asyncio.Task[None]] = {}
        self.models: Counter[str] = Counter()
        # Number of results that are being written.
        self.writing = 0
        self.counts: Counter[str] = Counter()
        # Number of times that a line was refused because its model could not be used.
        self._failures: Counter[str] = Counter()
        # Time on the loop's clock before which no line is started.
        self.not_before = 0.0
        # Set once no more lines are started: the outcome of those that were not run.
        self.stopped: Outcome | None = "canceled" if batch.status == "cancelling" else None

    @property
    def waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def waiting_models(self) -> list[str]:
        """Models for which lines wait."""
        return [model for model, lines in self._waiting.items() if lines]

    @property
    def has_no_more_lines(self) -> bool:
        """Whether no line runs, and none will be started."""
        return not self.running and not self.writing and (self.stopped is not None or not self.waiting)

    def view(self) -> StoredBatch:
        """Return the batch with the current counts."""
        return structs.replace(self.batch, counts=dict(self.counts)) if self.is_open else self.batch

    async def open(self, line_bytes_max: int) -> None:
        """Check the input file, and find the lines without a result. Ends the batch if the file has problems."""
        folder, batch = self._store.folder, self.batch
        if batch.output_file or batch.error_file:
            # An earlier daemon has all results, and was about to make files of them.
            self.counts, self.is_open = Counter(batch.counts), True
            return
        path = folder.part(batch.id, INPUT)

        def look() -> ScannedInput:
            try:
                return scan(path, batch.endpoint, line_bytes_max)
            except FileNotFoundError:
                return ScannedInput([], [_UNREADABLE])

        scanned = await self._store.run(look)
        if scanned.problems:
            self.batch = structs.replace(self.batch, problems=tuple(scanned.problems))
            await self._change("failed")
            return
        written = await self._store.run(lambda: folder.results(batch.id))
        self.counts = Counter(written.outcomes.values())
        for line in scanned.lines:
            if line.custom_id not in written.outcomes:
                self._waiting.setdefault(line.model, deque()).append(line)
        self.is_open = True
        # The batch may have been cancelled meanwhile.
        self.batch = structs.replace(self.batch, total=len(scanned.lines), model=scanned.model)
        if self.batch.status == "validating":
            await self._change("in_progress")

    def next_line(self, model: str) -> LinePlace:
        return self._waiting[model].popleft()

    def may_retry(self, line: LinePlace, status: int) -> bool:
        """Whether a refused line is tried again. A model that cannot be used may stay so, a key's limit does not."""
        self._failures[line.custom_id] += status == 503
        return self._failures[line.custom_id] < FAILURES_MAX

    def put_back(self, line: LinePlace) -> None:
        """Let a line wait again that was not answered."""
        self._waiting.setdefault(line.model, deque()).appendleft(line)

    async def read(self, line: LinePlace) -> InputLine:
        folder = self._store.folder
        return await self._store.run(lambda: read_line(folder.part(self.batch.id, INPUT), line))

    async def keep(self, outcome: Outcome, result: bytes) -> None:
        """Write a result. Raises `Unavailable` if it is not written."""
        suffix = OUTPUT if outcome == "succeeded" else ERRORS
        self.writing += 1
        try:
            await self._store.run(lambda: self._store.folder.write_result(self.batch.id, suffix, result))
        finally:
            self.writing -= 1
        self._store.grow(self.batch.id, len(result))
        self.counts[outcome] += 1

    async def cancel(self) -> None:
        """Start no more lines, and abort those that run."""
        if self.stopped is None:
            self.stopped = "canceled"
            await self._change("cancelling")
            self.abort()

    def expire(self) -> None:
        """Start no more lines, and abort those that run, because the completion window is over."""
        self.stopped = "expired"
        self.abort()

    def abort(self) -> None:
        """Abort the lines that run. They wait again."""
        for task in self.running.values():
            task.cancel()

    async def end(self) -> None:
        """Write the results of lines that were not run, and end the batch. May be repeated if it fails."""
        if self.stopped is None and self.batch.status != "finalizing":
            await self._change("finalizing")
        for model in self.waiting_models:
            while self._waiting[model]:
                custom_id, outcome = self._waiting[model][0].custom_id, self.stopped or "expired"
                await self.keep(outcome, unserved_line(custom_id, outcome, self.batch.is_anthropic))
                self._waiting[model].popleft()
        await self._make_files()
        status: Status = "expired" if self.counts["expired"] else "completed"
        await self._change("cancelled" if self.stopped == "canceled" else status)
        await self._store.drop_input(self.batch)

    async def _make_files(self) -> None:
        """Make the results files of the tenant. Their ids are stored first, so that a crash loses none of them."""
        batch, counts, folder = self.batch, self.counts, self._store.folder
        if not (batch.output_file or batch.error_file):
            await self._store.run(lambda: folder.sync_results(batch.id))
            tokens = (await self._store.run(lambda: folder.results(batch.id))).tokens
            has_errors = counts.total() > counts["succeeded"]
            batch = structs.replace(batch, counts=dict(counts), tokens=tokens)
            if not batch.is_anthropic:
                output = new_name(FILE_PREFIX) if counts["succeeded"] else ""
                errors = new_name(FILE_PREFIX) if has_errors else ""
                batch = structs.replace(batch, output_file=output, error_file=errors)
            self.batch = batch
            await self._store.update(batch)
        now, age_s = self._wall(), batch.output_age_s
        for suffix, name, kind in ((OUTPUT, batch.output_file, "output"), (ERRORS, batch.error_file, "error")):
            if name and name not in self._store.files:
                record = StoredFile(
                    id=name,
                    tenant=batch.tenant,
                    purpose="batch_output",
                    filename=f"{batch.id}_{kind}.jsonl",
                    size_bytes=0,
                    created=now,
                    expires=None if age_s is None else now + age_s,
                )
                await self._store.add_results(batch, suffix, record)

    async def _change(self, status: Status) -> None:
        reached = {**self.batch.reached, status: self._wall()}
        self.batch = structs.replace(self.batch, status=status, reached=reached)
        await self._store.update(self.batch)


POLL_S: Final = 0.25
SWEEP_S: Final = 60.0
# Delay after a failure of the disk.
RETRY_S: Final = 10.0
# A line that was refused is tried again after at most this time, because an operator may have made room.
DELAY_MAX_S: Final = 60.0
# Requests whose model does not exist are answered at once. So many of them run at a time.
UNKNOWN_AT_ONCE: Final = 4
# Maximum bytes of a line beside the body of its request.
LINE_BYTES_BEYOND_BODY: Final = 4096
_REQUEST_PREFIX: Final = "req_"


class BatchRunner:
    """Owner of the batches that have not ended. It runs as one task while anything is stored.

    `app` is the public app without authentication: the caller is in the scope.
    """

    app: ASGIApp

    def __init__(
        self, services: Services, store: BatchStore, gate: BatchGate, wall: Callable[[], float] = time.time
    ) -> None:
        self._services = services
        self._store = store
        self._gate = gate
        self._wall = wall
        self._running: dict[str, RunningBatch] = {}
        self._changed = asyncio.Event()
        self._sweep_at = float("-inf")
        self._is_ended = False
        self._task: asyncio.Task[None] | None = None
        services.metrics.batch_requests_waiting = lambda: sum(each.waiting for each in self._running.values())

    def add(self, batch: StoredBatch) -> None:
        """Begin a batch of this daemon or an earlier one."""
        self._running[batch.id] = RunningBatch(batch, self._store, self._wall)
        self.wake()

    def view(self, batch: StoredBatch) -> StoredBatch:
        """Return a batch with its current counts."""
        running = self._running.get(batch.id)
        return batch if running is None else running.view()

    async def cancel(self, batch: StoredBatch) -> StoredBatch:
        """Cancel a batch unless it has ended. Returns its new state."""
        running = self._running.get(batch.id)
        if running is None:
            return batch
        await running.cancel()
        self._changed.set()
        return running.view()

    def leave(self) -> None:
        """Abort all lines, which the next daemon runs. Answers that are complete are still written."""
        self._is_ended = True
        for batch in self._running.values():
            batch.abort()
        self._changed.set()
        self._changed.set()

    def wake(self) -> None:
        """Run until nothing is stored any more."""
        if not self._is_ended and (self._task is None or self._task.done()):
            self._task = self._services.tasks.start(self._run(), "the runner of batches")
        self._changed.set()

    async def _run(self) -> None:
        while not self._is_ended and (self._store.files or self._store.batches):
            try:
                await self._turn()
            except ApiError:
                await asyncio.sleep(RETRY_S)  # The store has logged the failure of the disk.
            except Exception:  # The loop must go on after any error.
                self._services.metrics.unhandled_errors += 1
                log.exception("internal error while batches were run")
                await asyncio.sleep(RETRY_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S if self._running else SWEEP_S):
                    await self._changed.wait()
            self._changed.clear()

    async def _turn(self) -> None:
        now = self._wall()
        if (at := time.monotonic()) >= self._sweep_at:
            self._sweep_at = at + SWEEP_S
            for name in self._store.expired(now):
                await self._store.delete(name)
        for batch in list(self._running.values()):
            await self._open_or_end(batch, now)
        if self._running:
            self._yield_memory()
            await self._start_lines()

    async def _open_or_end(self, batch: RunningBatch, now: float) -> None:
        """Open a new batch, and end one that has no more lines or no more time."""
        if not batch.is_open and not batch.batch.has_ended:
            await batch.open(self._services.config.server.max_body_bytes + LINE_BYTES_BEYOND_BODY)
        if batch.is_open and not batch.has_no_more_lines and batch.stopped is None and now >= batch.batch.expires:
            batch.expire()
        if batch.is_open and batch.has_no_more_lines:
            await batch.end()
        if batch.batch.has_ended:
            del self._running[batch.batch.id]
            for outcome in ("canceled", "expired"):
                self._services.metrics.batch_requests[outcome] += batch.counts[outcome]
            log.info("batch %s: %s, %s", batch.batch.id, batch.batch.status, dict(batch.counts))

    # -- lines -------------------------------------------------------------------------------------------------------

    def _yield_memory(self) -> None:
        """Abort all lines while another model waits for memory: an idle model can be unloaded for it at once."""
        models = {model for batch in self._running.values() for model in batch.models}
        if any(name not in models for name in self._services.pool.broker.view().waiting):
            for batch in self._running.values():
                batch.abort()

    async def _start_lines(self) -> None:
        """Start as many lines as fill the batch of each model, one of each batch in turn."""
        running = Counter[str]()
        for batch in self._running.values():
            running.update(batch.models)
        admitted: dict[str, int] = {}
        has_started = True
        while has_started:
            has_started = False
            for batch in list(self._running.values()):
                has_started |= await self._start_line(batch, running, admitted)

    async def _start_line(self, batch: RunningBatch, running: Counter[str], admitted: dict[str, int]) -> bool:
        """Start one line of a batch if its model may run one more."""
        if not batch.is_open or batch.stopped is not None or self._is_ended:
            return False
        if asyncio.get_running_loop().time() < batch.not_before or not self._store.room_bytes(batch.batch.tenant):
            return False
        caller = self._caller(batch.batch)
        for name in batch.waiting_models:
            model = self._model(name, caller)
            if model not in admitted:
                admitted[model] = await self._places(model)
            if running[model] < admitted[model] and batch.stopped is None and not self._is_ended:
                self._start(batch, batch.next_line(name), model, caller)
                running[model] += 1
                return True
        return False

    def _model(self, name: str, caller: Caller | None) -> str:
        """Return the configured model that a line names; an empty text if it has none."""
        if caller is None:
            return ""
        try:
            return self._services.live.router.resolve(name, caller).name
        except (ModelNotFound, BadRequest):
            return ""

    async def _places(self, model: str) -> int:
        """Return how many lines may run on a model now."""
        if not model:
            return UNKNOWN_AT_ONCE
        if not await self._gate.admits(model):
            return 0
        worker = self._services.pool.find(model)
        if worker is not None and worker.ready is not None:
            return worker.ready.max_running
        return self._services.config.models[model].slots

    def _caller(self, batch: StoredBatch) -> Caller | None:
        """Return the caller of a batch; None if its key is no longer in force."""
        keyring = self._services.keyring
        keyring.refresh()
        if batch.is_everybodys and not keyring.is_open:
            return None
        caller = keyring.named(batch.key, batch.tenant)
        return None if caller is None else replace(caller, is_batch=True, may_leave=False)

    def _start(self, batch: RunningBatch, line: LinePlace, model: str, caller: Caller | None) -> None:
        task = self._services.tasks.start(self._run_line(batch, line, caller), f"a line of {batch.batch.id}")
        batch.running[line.custom_id] = task
        batch.models[model] += 1

        def ended(_: object) -> None:
            batch.models[model] -= 1
            if not batch.models[model]:
                del batch.models[model]
            if batch.running.pop(line.custom_id, None) is not None:
                batch.put_back(line)  # It has no result.
            self._changed.set()

        task.add_done_callback(ended)

    async def _run_line(self, batch: RunningBatch, line: LinePlace, caller: Caller | None) -> None:
        """Run one line and keep its result. A line that is aborted or refused waits again."""
        try:
            answer = await self._answer(await batch.read(line), caller)
            if answer.is_refusal and batch.may_retry(line, answer.status):
                self._delay(batch, answer.retry_after_s)
                return
            # From here on nothing aborts the line.
            del batch.running[line.custom_id]
            outcome, result = served_line(line.custom_id, answer, batch.batch.is_anthropic)
            try:
                await batch.keep(outcome, result)
            except ApiError:
                batch.put_back(line)
                raise
        except ApiError:
            self._delay(batch, RETRY_S)  # The store has logged the failure of the disk.
        else:
            self._services.metrics.batch_requests[outcome] += 1

    async def _answer(self, line: InputLine, caller: Caller | None) -> InnerAnswer:
        """Send a line to the app, as the request that a client would send."""
        sender: Caller | ApiError = caller or Unauthorized("The API key of this batch is no longer in force.", None)
        if field := unsupported_field(line):
            sender = Unsupported(f"'{field}' is not supported in a batch.", field)
        return await InnerRequest(sender, line.url, bytes(line.body), new_name(_REQUEST_PREFIX)).answered_by(self.app)

    def _delay(self, batch: RunningBatch, delay_s: float) -> None:
        batch.not_before = asyncio.get_running_loop().time() + min(delay_s, DELAY_MAX_S)
