"""Loops of models that generate no text: jobs take turns, one piece of work after another.

Queued job: one request of a turn loop, with its arrival, tenant and deadline.

Loop of jobs that take turns. A subclass computes the turns.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TypeVar

from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Delta, Finish, Up, Usage
from protocol.spec import DEFAULT_MAX_RUNNING, WorkerSpec
from protocol.to_worker import Abort, Drain, SetMemory, SetPace, Shutdown
from worker.engine.gauges import Gauges
from worker.engine.request_loop import RequestLoop
from worker.engine.scheduling.pacing import DutyCycle
from worker.errors import StepFailed, cannot_run, foreign_code, is_allocation_failure, is_gpu_fault
from worker.model import memory


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedJob:
    """Request owned by the loop from the moment it leaves the intake. Its times are of the monotonic clock."""

    rid: int
    arrived: float
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    wants_progress: bool = False
    # Deviations from the request that are reported to its client.
    deviations: tuple[str, ...] = ()
    arrival: int = 0
    admitted: float = 0.0

    @property
    def tokens(self) -> int:
        """Number of input tokens."""
        raise NotImplementedError

    def usage(self, now: float) -> Usage:
        """Return the usage of this job so far."""
        admitted = self.admitted or now
        return Usage(
            prompt=self.tokens,
            cached=0,
            completion=0,
            queue_ms=(admitted - self.arrived) * 1e3,
            prefill_ms=(now - admitted) * 1e3,
        )


J = TypeVar("J", bound=QueuedJob)
LoopCommand = Abort | Drain | Shutdown | SetMemory | SetPace


class TurnLoop(RequestLoop[J]):
    """Owner of the jobs. Any thread may put commands into `inbox`. Only MLX's thread calls `run`."""

    def __init__(self, spec: WorkerSpec, weights_bytes: int, send: Callable[[Up], None], gauges: Gauges) -> None:
        super().__init__(spec, gauges, send, one_delta_per_frame=True)
        self.inbox: SimpleQueue[J | LoopCommand] = SimpleQueue()
        self._grant = memory.MemoryGrant(spec, weights_bytes)
        self._arrivals = itertools.count(1)
        # Serial number of the last turn of each waiting tenant.
        self._turns: dict[str, int] = {}
        self._turn = itertools.count(1)
        self._duty_cycle = DutyCycle()

    def run(self) -> None:
        """Serve until a shutdown. Raises `StepFailed` when the loop cannot continue."""
        while not self._is_stopping:
            self._receive_commands()
            self._enforce_deadlines()
            if self._requests and not self._is_stopping and not self._duty_cycle.left_s(time.monotonic()):
                began = time.monotonic()
                self._take_turn()
                self._duty_cycle.worked(began, time.monotonic())
            self._flush()
            self._grant.check()
        self._end_all()

    def warm_up(self) -> None:
        """Compute one answer, and apply the memory limits. Raises `LoadFailed`."""
        with foreign_code(cannot_run):
            self._compute_once()
        self._apply(self._grant.limits())

    # -- for a subclass ----------------------------------------------------------------------------------------------

    def _compute_once(self) -> None:
        """Compute one short answer, which is dropped."""
        raise NotImplementedError

    def _take_turn(self) -> None:
        """Compute one piece of work for the first job that `_in_turn` returns. There is at least one job."""
        raise NotImplementedError

    def _ending(self, job: J, finish: Finish, failure: Failure | None) -> Delta:
        """Return the delta that ends a job."""
        return Delta(job.rid, finish=finish, usage=job.usage(time.monotonic()), failure=failure)

    # -- failed turns ------------------------------------------------------------------------------------------------

    def _survive(self, error: Exception) -> bool:
        """Return whether an allocation failed. Raises `StepFailed` for a fault of the GPU, which ends the worker."""
        is_allocation = is_allocation_failure(error)
        if is_gpu_fault(error) and not is_allocation:
            raise StepFailed(Code.WORKER_DIED, "the model's step loop failed", detail=repr(error)) from error
        if is_allocation:
            self._gauges.allocation_failures += 1
            memory.give_back()
        return is_allocation

    def _fail(self, job: J, failure: Failure) -> None:
        """End a job with a failure, unless it has ended."""
        if job.rid in self._requests:
            self._finish(job, Finish.ERROR, failure)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _in_turn(self) -> list[J]:
        """Return all jobs, sorted by priority, then by the newest turn of the job's tenant. The first job is the next
        one, and its tenant's turn is recorded. Jobs of batches are left out while there are others."""
        jobs = sorted(
            (job for job in self._requests.values() if not (self._yields and job.rid in self._batched)),
            key=lambda job: (job.priority, self._turns.get(job.tenant, 0), job.arrival),
        )
        self._turns[jobs[0].tenant] = next(self._turn)
        return jobs

    def _receive_commands(self) -> None:
        """Handle everything in the inbox; blocks only if there is nothing else to do."""
        commands: list[J | LoopCommand] = []
        if self._is_idle:
            self._idle()
            commands.append(self.inbox.get())
        elif rest_s := self._duty_cycle.left_s(time.monotonic()):
            with suppress(Empty):
                commands.append(self.inbox.get(timeout=rest_s))
        self._gauges.busy_since = time.monotonic()
        self._handle_waiting(commands)

    def _handle_waiting(self, commands: "Sequence[J | LoopCommand]" = ()) -> None:
        """Handle `commands`, then everything in the inbox."""
        waiting = [*commands]
        with suppress(Empty):
            while True:
                waiting.append(self.inbox.get_nowait())
        self._handle_all(waiting)

    def _handle(self, command: J | LoopCommand) -> None:
        match command:
            case SetMemory():
                self._apply(self._grant.change(command))
            case SetPace():
                self._duty_cycle.set_ratio(command.duty_cycle)
            case _:
                super()._handle(command)

    def _idle(self) -> None:
        self._turns.clear()
        super()._idle()

    def _apply(self, limits: memory.AllocationLimits) -> None:
        self._grant.enforce(limits)
        self._gauges.granted_bytes = self._grant.bytes
        self._gauges.mem_limit = limits.total
        self._gauges.wired_limit = self._grant.wired_limit

    @property
    def _is_full(self) -> bool:
        most = (self._spec.max_running or DEFAULT_MAX_RUNNING) + self._spec.max_waiting
        return len(self._requests) - len(self._batched) >= most

    def _accepted(self, request: J) -> Accepted:
        return Accepted(request.rid, request.tokens, request.deviations)

    def _enter(self, request: J) -> None:
        request.arrival = next(self._arrivals)

    def _finish(self, request: J, finish: Finish, failure: Failure | None = None) -> None:
        del self._requests[request.rid]
        self._batched.discard(request.rid)
        self._outbox.add(self._ending(request, finish, failure))
