"""The loop of a model that reads: jobs in, one forward pass after the other, one answer for each job.

Every job that enters leaves through `_finish`, exactly once.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, assert_never

import mlx.core as mx
import numpy as np

from protocol.failures import Code, Failure
from protocol.messages import (
    Abort,
    Accepted,
    Delta,
    Drain,
    Drained,
    Finish,
    Progress,
    Rejected,
    SetMemory,
    SetPace,
    Shutdown,
    Step,
    Up,
)
from protocol.spec import USUAL_RUNNING, WorkerSpec
from worker.embedding.groups import Place, take_group
from worker.embedding.job import Item, Job, Numbers
from worker.embedding.load_model import Reader
from worker.engine.gauges import Gauges
from worker.errors import LoadFailed, StepFailed, is_allocation_failure, is_gpu_fault
from worker.model import memory
from worker.pacing.rests import Rests

log = logging.getLogger("mlxd.worker")

Command = Job | Abort | Drain | Shutdown | SetMemory | SetPace

# Tokens of one forward pass with its padding. A CPU gains nothing by more, and an abort waits for the pass.
_GPU_TOKENS: Final = 16_384
CPU_TOKENS: Final = 2_048
_LEAST_TOKENS: Final = 256
# After an allocation that failed, passes have half the tokens, and twice as many again after so long.
_RELAX_S: Final = 300.0
_STATS_EVERY_S: Final = 0.1
_MEMORY_EVERY_S: Final = 1.0
# An abort can overtake its request, which waits for the tokenizer.
_MOST_TOMBSTONES: Final = 1 << 16
_WARM_UP: Final = 16
_STOPPING: Final = Failure(Code.DRAINING, "the model is being stopped; try again")
_NOT_FINITE: Final = Failure(
    Code.ROW_FAILED, "the model gave no number for one of the inputs: its vector is not finite, or null"
)


class JobLoop:
    """Owns the jobs. Commands come in by `inbox`, messages leave by `send`; `run` belongs to one thread, MLX's."""

    def __init__(
        self,
        reader: Reader,
        spec: WorkerSpec,
        inbox: "SimpleQueue[Command]",
        send: Callable[[Up], None],
        gauges: Gauges,
    ) -> None:
        self._reader = reader
        self._spec = spec
        self._inbox = inbox
        self._send = send
        self._gauges = gauges
        self._share = memory.Share(spec, reader.weights_bytes)
        self._most_tokens = _GPU_TOKENS if memory.has_gpu() else CPU_TOKENS
        self._tokens = self._most_tokens
        self._relaxes_at = 0.0
        self._jobs: dict[int, Job] = {}
        self._arrivals = itertools.count(1)
        # Of each tenant that waits: when it last had its turn.
        self._turns: dict[str, int] = {}
        self._turn = itertools.count(1)
        self._tombstones: dict[int, None] = {}
        self._deltas: list[Delta] = []
        self._drain_until: float | None = None
        self._aborted_by_drain = 0
        self._drained_at = float("-inf")
        self._is_stopping = False
        self._stats_due = self._memory_due = 0.0
        self._rests = Rests()

    def warm_up(self) -> None:
        """Compute once, and keep the memory limits. Raises `LoadFailed`."""
        item = Item(tuple(at % self._reader.vocab_size for at in range(min(_WARM_UP, self._reader.max_context))))
        try:
            self._reader.compute([item])
        except Exception as error:  # the boundary to code of every architecture
            code = Code.OUT_OF_MEMORY if is_allocation_failure(error) else Code.MODEL_UNSUPPORTED
            message = f"the model cannot be run: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            raise LoadFailed(code, message) from error
        self._apply(self._share.limits())

    def run(self) -> None:
        """Serve until told to shut down. Raises `StepFailed` when the loop cannot go on."""
        while not self._is_stopping:
            self._take_commands()
            self._enforce_deadlines()
            if self._jobs and not self._is_stopping and not self._rests.left_s(time.monotonic()):
                began = time.monotonic()
                self._pass()
                self._rests.worked(began, time.monotonic())
            self._flush()
            self._share.check()
        self.fail_all(_STOPPING)

    def fail_all(self, failure: Failure) -> None:
        """The terminal event of every job before the loop ends."""
        for job in list(self._jobs.values()):
            self._finish(job, Finish.ERROR, failure)
        self._flush()

    # -- commands ----------------------------------------------------------------------------------------------------

    def _take_commands(self) -> None:
        """Everything in the inbox, aborts first; blocks only when there is nothing else to do."""
        commands: list[Command] = []
        if not self._jobs and self._drain_until is None:
            self._idle()
            commands.append(self._inbox.get())
        elif rest_s := self._rests.left_s(time.monotonic()):
            with suppress(Empty):
                commands.append(self._inbox.get(timeout=rest_s))
        with suppress(Empty):
            while True:
                commands.append(self._inbox.get_nowait())
        self._gauges.busy_since = time.monotonic()
        for command in sorted(commands, key=lambda command: not isinstance(command, Abort)):
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Abort():
                for rid in command.rids:
                    self._abort(rid)
            case Job():
                self._enqueue(command)
            case Drain():
                self._drain_until = time.monotonic() + command.deadline_s
            case Shutdown():
                self._is_stopping = True
            case SetMemory():
                self._apply(self._share.change(command))
            case SetPace():
                self._rests.set_duty(command.duty)
            case _:
                assert_never(command)

    def _idle(self) -> None:
        self._turns.clear()
        self._gauges.running = self._gauges.waiting = 0
        self._gauges.busy_since = 0.0
        self._gauges.measure_memory()

    def _apply(self, limits: memory.Limits) -> None:
        self._share.enforce(limits)
        self._gauges.share_bytes = self._share.bytes
        self._gauges.mem_limit = limits.total
        self._gauges.wired_limit = self._share.wired_limit

    def _abort(self, rid: int) -> None:
        job = self._jobs.get(rid)
        if job is not None:
            self._finish(job, Finish.ABORT)
            return
        self._tombstones[rid] = None
        while len(self._tombstones) > _MOST_TOMBSTONES:
            del self._tombstones[next(iter(self._tombstones))]

    def _enqueue(self, job: Job) -> None:
        if job.rid in self._jobs:  # its one terminal event belongs to the job that is already here
            log.error("request %d arrived twice; the second was dropped", job.rid)
            return
        if self._drain_until is not None or job.arrived <= self._drained_at:
            self._send(Rejected(job.rid, _STOPPING))
            return
        if len(self._jobs) >= (self._spec.max_running or USUAL_RUNNING) + self._spec.max_waiting:
            self._send(Rejected(job.rid, Failure(Code.BUSY, "the model's queue is full; try again")))
            return
        self._send(Accepted(job.rid, job.tokens))
        job.arrival = next(self._arrivals)
        self._jobs[job.rid] = job
        if job.rid in self._tombstones:
            del self._tombstones[job.rid]
            self._finish(job, Finish.ABORT)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline is not None and now >= job.deadline]:
            self._finish(job, Finish.ERROR, Failure(Code.DEADLINE_EXCEEDED, "the request's deadline has passed"))
        if self._drain_until is None:
            return
        if self._jobs and now >= self._drain_until:
            self._aborted_by_drain = len(self._jobs)
            self.fail_all(_STOPPING)
        if not self._jobs:
            self._flush()
            self._drained_at = time.monotonic()
            self._send(Drained(self._spec.epoch, self._aborted_by_drain))
            self._drain_until, self._aborted_by_drain = None, 0

    # -- one pass ----------------------------------------------------------------------------------------------------

    def _pass(self) -> None:
        """One forward pass for the job whose turn it is, and whatever of others is as long."""
        now = time.monotonic()
        if self._tokens < self._most_tokens and now >= self._relaxes_at:
            self._tokens, self._relaxes_at = self._tokens * 2, now + _RELAX_S
        jobs = sorted(self._jobs.values(), key=lambda job: (job.priority, self._turns.get(job.tenant, 0), job.arrival))
        self._turns[jobs[0].tenant] = next(self._turn)
        group = take_group(jobs, self._tokens)
        for place in group:
            place.job.admitted = place.job.admitted or now
        running = len({place.job.rid for place in group})
        self._gauges.running, self._gauges.waiting = running, len(self._jobs) - running
        self._compute(group)
        self._gauges.step_seq += 1

    def _compute(self, group: Sequence[Place]) -> None:
        try:
            rows = self._reader.compute([place.item for place in group])
        except Exception as error:  # the boundary to code of every architecture
            self._recover(group, error)
        else:
            self._store(group, rows)

    def _store(self, group: Sequence[Place], rows: Numbers) -> None:
        sound = [bool(np.isfinite(row).all()) for row in rows]
        if self._reader.embedding is not None:
            sound = [is_sound and bool(row.any()) for is_sound, row in zip(sound, rows, strict=True)]
        tokens = 0
        for place, row, is_sound in zip(group, rows, sound, strict=True):
            if place.job.rid not in self._jobs:
                continue
            if not is_sound and len(group) > 1:
                # What was beside it cannot be the reason, and is not to be it.
                self._compute([place])
                continue
            if not is_sound:
                log.error("request %d: input %d has no finite vector", place.job.rid, place.at)
                self._finish(place.job, Finish.ERROR, _NOT_FINITE)
                continue
            place.job.store(place.at, row)
            tokens += len(place.item.ids)
        self._gauges.prompt_tokens += tokens
        for job in {place.job.rid: place.job for place in group}.values():
            if job.rid not in self._jobs:
                continue
            if job.wants_progress:
                self._send(Progress(job.rid, job.computed_tokens, job.tokens))
            if job.is_computed:
                self._finish(job, Finish.STOP)

    def _recover(self, group: Sequence[Place], error: Exception) -> None:
        """Compute the group again in smaller parts; one item that fails alone is the end of its job."""
        if is_gpu_fault(error) and not is_allocation_failure(error):
            raise StepFailed(Code.WORKER_DIED, "the model's step loop failed", detail=repr(error)) from error
        if is_allocation_failure(error):
            self._gauges.allocation_failures += 1
            self._tokens = max(_LEAST_TOKENS, self._tokens // 2)
            self._relaxes_at = time.monotonic() + _RELAX_S
            mx.clear_cache()
        log.warning("a pass of %d inputs failed: %s", len(group), error)
        if len(group) > 1:
            middle = len(group) // 2
            self._compute(group[:middle])
            self._compute(group[middle:])
            return
        job = group[0].job
        if job.rid in self._jobs:
            message = f"the request failed while an input was computed: {type(error).__name__}"
            self._finish(job, Finish.ERROR, Failure(Code.ROW_FAILED, message, repr(error)))

    # -- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, job: Job, finish: Finish, failure: Failure | None = None) -> None:
        """The one place where a job ends."""
        del self._jobs[job.rid]
        data = job.data() if finish is Finish.STOP else b""
        self._deltas.append(
            Delta(job.rid, finish=finish, usage=job.usage(time.monotonic()), failure=failure, data=data)
        )

    def _flush(self) -> None:
        """One message for each answer, as one frame holds no more, with stats now and then."""
        now = time.monotonic()
        gauges = self._gauges
        gauges.busy_since = now
        is_due = now >= self._stats_due
        if not self._deltas and not is_due:
            return
        if now >= self._memory_due:
            gauges.measure_memory()
            self._memory_due = now + _MEMORY_EVERY_S
        if is_due:
            self._stats_due = now + _STATS_EVERY_S
        deltas, self._deltas = self._deltas, []
        for delta in deltas:
            self._send(Step(self._spec.epoch, gauges.step_seq, [delta]))
        if is_due:
            self._send(Step(self._spec.epoch, gauges.step_seq, [], gauges.snapshot()))
