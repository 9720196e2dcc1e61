"""Loop of jobs that take turns: commands, deadlines, drains and ends. A subclass computes the turns.

Every job that enters leaves through `_finish`, exactly once.
"""

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, Generic, TypeVar

from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Delta, Finish, Rejected, Step, Up
from protocol.spec import USUAL_RUNNING, WorkerSpec
from protocol.to_worker import Abort, Drain, SetMemory, SetPace, Shutdown
from worker.engine.gauges import Gauges
from worker.engine.inbox import EarlyAborts, EngineDrain
from worker.engine.scheduling.rests import Rests
from worker.jobs.queued import QueuedJob
from worker.model import memory

log = logging.getLogger("mlxd.worker")

J = TypeVar("J", bound=QueuedJob)

_STATS_EVERY_S: Final = 0.1
_MEMORY_EVERY_S: Final = 1.0
_STOPPING: Final = Failure(Code.DRAINING, "the model is being stopped; try again")


class TurnLoop(Generic[J]):
    """Owner of the jobs. Commands come from `inbox`, messages leave through `send`; one thread, MLX's, calls `run`."""

    def __init__(
        self,
        spec: WorkerSpec,
        weights_bytes: int,
        inbox: "SimpleQueue[J | Abort | Drain | Shutdown | SetMemory | SetPace]",
        send: Callable[[Up], None],
        gauges: Gauges,
    ) -> None:
        self._spec = spec
        self._inbox = inbox
        self._send = send
        self._gauges = gauges
        self._share = memory.MemoryShare(spec, weights_bytes)
        self._jobs: dict[int, J] = {}
        self._arrivals = itertools.count(1)
        # Number of the last turn of each waiting tenant.
        self._turns: dict[str, int] = {}
        self._turn = itertools.count(1)
        self._early_aborts = EarlyAborts()
        self._deltas: list[Delta] = []
        self._drain = EngineDrain()
        self._is_stopping = False
        self._stats_due = self._memory_due = 0.0
        self._rests = Rests()

    def run(self) -> None:
        """Serve until a shutdown. Raises `StepFailed` when the loop cannot continue."""
        while not self._is_stopping:
            self._take_commands()
            self._enforce_deadlines()
            if self._jobs and not self._is_stopping and not self._rests.left_s(time.monotonic()):
                began = time.monotonic()
                self._take_turn()
                self._rests.worked(began, time.monotonic())
            self._flush()
            self._share.check()
        self.fail_all(_STOPPING)

    def fail_all(self, failure: Failure) -> None:
        """Send the terminal event of every job before the loop ends."""
        for job in list(self._jobs.values()):
            self._finish(job, Finish.ERROR, failure)
        self._flush()

    # -- of a subclass -----------------------------------------------------------------------------------------------

    def _take_turn(self) -> None:
        """Compute one piece of work of the first job of `_in_turn`. There is at least one job."""
        raise NotImplementedError

    def _ending(self, job: J, finish: Finish, failure: Failure | None) -> Delta:
        """Return the delta that ends a job."""
        return Delta(job.rid, finish=finish, usage=job.usage(time.monotonic()), failure=failure)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _in_turn(self) -> list[J]:
        """Return all jobs with the next one first: by priority, then by its tenant's last turn, which is now."""
        jobs = sorted(self._jobs.values(), key=lambda job: (job.priority, self._turns.get(job.tenant, 0), job.arrival))
        self._turns[jobs[0].tenant] = next(self._turn)
        return jobs

    def _take_commands(self) -> None:
        """Handle everything in the inbox, aborts first; blocks only if there is nothing else to do."""
        commands: list[J | Abort | Drain | Shutdown | SetMemory | SetPace] = []
        if not self._jobs and not self._drain.is_on:
            self._idle()
            commands.append(self._inbox.get())
        elif rest_s := self._rests.left_s(time.monotonic()):
            with suppress(Empty):
                commands.append(self._inbox.get(timeout=rest_s))
        self._gauges.busy_since = time.monotonic()
        self._obey_waiting(commands)

    def _obey_waiting(self, commands: "Sequence[J | Abort | Drain | Shutdown | SetMemory | SetPace]" = ()) -> None:
        """Handle these commands and everything in the inbox, aborts first."""
        waiting = [*commands]
        with suppress(Empty):
            while True:
                waiting.append(self._inbox.get_nowait())
        for command in sorted(waiting, key=lambda command: not isinstance(command, Abort)):
            self._obey(command)

    def _obey(self, command: J | Abort | Drain | Shutdown | SetMemory | SetPace) -> None:
        match command:
            case Abort():
                for rid in command.rids:
                    self._abort(rid)
            case Drain():
                self._drain.begin(command.deadline_s)
            case Shutdown():
                self._is_stopping = True
            case SetMemory():
                self._apply(self._share.change(command))
            case SetPace():
                self._rests.set_duty(command.duty)
            case _:
                self._enqueue(command)

    def _idle(self) -> None:
        self._turns.clear()
        self._gauges.running = self._gauges.waiting = 0
        self._gauges.busy_since = 0.0
        self._gauges.measure_memory()

    def _apply(self, limits: memory.ShareLimits) -> None:
        self._share.enforce(limits)
        self._gauges.share_bytes = self._share.bytes
        self._gauges.mem_limit = limits.total
        self._gauges.wired_limit = self._share.wired_limit

    def _abort(self, rid: int) -> None:
        job = self._jobs.get(rid)
        if job is not None:
            self._finish(job, Finish.ABORT)
        else:
            self._early_aborts.add(rid)

    def _enqueue(self, job: J) -> None:
        if job.rid in self._jobs:  # the one terminal event of this rid belongs to the first job
            log.error("request %d arrived twice; the second was dropped", job.rid)
            return
        if self._drain.refuses(job.arrived):
            self._send(Rejected(job.rid, _STOPPING))
            return
        if len(self._jobs) >= (self._spec.max_running or USUAL_RUNNING) + self._spec.max_waiting:
            self._send(Rejected(job.rid, Failure(Code.BUSY, "the model's queue is full; try again")))
            return
        self._send(Accepted(job.rid, job.tokens, job.relaxed))
        job.arrival = next(self._arrivals)
        self._jobs[job.rid] = job
        if self._early_aborts.take(job.rid):
            self._finish(job, Finish.ABORT)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for job in [job for job in self._jobs.values() if job.deadline is not None and now >= job.deadline]:
            self._finish(job, Finish.ERROR, Failure(Code.DEADLINE_EXCEEDED, "the request's deadline has passed"))
        if self._jobs and self._drain.is_due(now):
            self._drain.aborted = len(self._jobs)
            self.fail_all(_STOPPING)
        if self._drain.is_on and not self._jobs:
            self._flush()
            self._send(self._drain.end(self._spec.epoch))

    # -- ends --------------------------------------------------------------------------------------------------------

    def _finish(self, job: J, finish: Finish, failure: Failure | None = None) -> None:
        """End a job; every job ends here."""
        del self._jobs[job.rid]
        self._deltas.append(self._ending(job, finish, failure))

    def _flush(self) -> None:
        """Send one message for each delta, because a frame may hold no more, and stats periodically."""
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
