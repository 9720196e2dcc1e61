"""Runner of batches: it starts their lines while nothing else runs, keeps the results, and ends the batches."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from starlette.types import ASGIApp

from gateway.access.caller import Caller
from gateway.api.batches.batch_store import BatchStore
from gateway.api.batches.inner_request import InnerAnswer, InnerRequest
from gateway.api.batches.input_lines import InputLine, LinePlace, unsupported_field
from gateway.api.batches.line_results import served_line
from gateway.api.batches.records import StoredBatch, new_name
from gateway.api.batches.running_batch import RunningBatch
from gateway.errors import ApiError, BadRequest, ModelNotFound, Unauthorized, Unsupported
from gateway.request.batch_gate import BatchGate
from gateway.services import Services

log = logging.getLogger(__name__)

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
            await self._tend(batch, now)
        if self._running:
            self._yield_memory()
            await self._start_lines()

    async def _tend(self, batch: RunningBatch, now: float) -> None:
        """Open a new batch, and end one that has no more lines or no more time."""
        if not batch.is_open and not batch.batch.has_ended:
            await batch.open(self._services.config.server.max_body_bytes + LINE_BYTES_BEYOND_BODY)
        if batch.is_open and not batch.is_settled and batch.stopped is None and now >= batch.batch.expires:
            batch.expire()
        if batch.is_open and batch.is_settled:
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
        if any(name not in models for name in self._services.pool.memory().waiting):
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
            return self._services.router.resolve(name, caller).name
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
