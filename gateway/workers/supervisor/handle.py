"""Handle of a worker: the state and the commands that the pool, the memory broker and requests use."""

import asyncio
import signal
from collections.abc import Callable
from functools import partial

from gateway.link.failover import ParkedSequences
from gateway.workers.supervisor import inbox
from gateway.workers.supervisor.inbox import CommandKind, EventKind, Waiter, Waiters, WorkerInbox
from gateway.workers.supervisor.incarnation import Incarnation
from gateway.workers.supervisor.ports import Effects, WorkerPort
from gateway.workers.supervisor.restart_policy import RestartPolicy
from gateway.workers.supervisor.state import SHUTTING_DOWN, ModelUnavailable, State, WorkerView
from protocol.failures import Failure
from protocol.from_worker import Ready
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import Generate


class WorkerHandle:
    """State of one model's worker, and commands to it. Only `Worker` changes the state; commands go through its inbox.

    Three changes bypass the inbox, because the next request must see them: the gate and the overload, which the memory
    broker sets, and a failed send.
    """

    incarnation: Incarnation

    def __init__(self, spec: WorkerSpec, effects: Effects, *, is_preload: bool) -> None:
        self.name = spec.name
        self.spec = spec
        self.is_preload = is_preload
        self.state = State.STOPPED
        self.since = effects.now()
        # Whether the model was unloaded to make room or by its TTL. Health checks ignore a preload that was evicted.
        self.was_evicted = False
        self.parked = ParkedSequences(spec.name, effects.link, effects.events, effects.limits.resume, effects.now)
        self.restart_policy = RestartPolicy(spec.name)
        self._effects = effects
        self._events = effects.events
        self._inbox = WorkerInbox()
        # `_waiters` wait until the model is ready, `_stoppers` until it has stopped.
        self._waiters = Waiters()
        self._stoppers = Waiters()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether the worker takes new requests."""
        is_held = self.incarnation.is_unreachable or self.incarnation.is_gated or self.parked.is_isolating
        return self.state is State.READY and not is_held

    @property
    def is_resident(self) -> bool:
        """Whether the worker is starting (which includes waiting for memory), loading or ready. A worker that drains
        does not count, because it will stop.
        """
        return self.state in (State.STARTING, State.LOADING, State.READY)

    @property
    def has_parked(self) -> bool:
        """Whether sequences wait for the next worker, or for their turn on this one."""
        return self.parked.has_any or self.parked.is_isolating

    @property
    def epoch(self) -> int:
        return self.incarnation.epoch

    @property
    def ready(self) -> Ready | None:
        return self.incarnation.ready

    @property
    def pid(self) -> int:
        return self.incarnation.pid

    @property
    def stats(self) -> Stats | None:
        return self.incarnation.stats

    @property
    def retry_after_s(self) -> float:
        is_waiting = self.state in (State.BACKOFF, State.FAILED)
        return self.restart_policy.wait_s(self._effects.now()) if is_waiting else 0.0

    def view(self) -> WorkerView:
        incarnation = self.incarnation
        loading = incarnation.loading
        return WorkerView(
            name=self.name,
            path=self.spec.path,
            state=self.state,
            epoch=incarnation.epoch,
            pid=incarnation.pid,
            is_adopted=incarnation.is_adopted,
            is_preload=self.is_preload and not self.was_evicted,
            ready=incarnation.ready,
            stats=incarnation.stats,
            stage=loading.stage if loading is not None else "",
            loaded_bytes=loading.done_bytes if loading is not None else 0,
            total_bytes=loading.total_bytes if loading is not None else 0,
            since_s=self._effects.now() - self.since,
            restarts=self.restart_policy.restarts,
            last_failure=self.restart_policy.last_failure,
            retry_after_s=self.retry_after_s,
        )

    def refusal(self, request: Generate) -> Failure | None:
        """Return the reason to refuse a request (short memory, quarantine), or None."""
        if (overload := self.incarnation.overload) is not None:
            self._events.memory_refused(self.name)
            return overload
        return self.parked.refusal(request)

    # -- commands ------------------------------------------------------------------------------------------------------

    async def ensure_ready(self) -> None:
        """Wait until the model can take requests. Raises `ModelUnavailable`."""
        if not self.is_ready:
            await self._command(partial(inbox.WorkerCommand, CommandKind.READY))

    async def load(self) -> None:
        """Load the model, even if it has failed, and wait until it is ready. Raises `ModelUnavailable`."""
        await self._command(partial(inbox.WorkerCommand, CommandKind.LOAD))

    async def restart(self) -> None:
        """Replace the process and wait until it is ready; it resumes running sequences. Raises `ModelUnavailable`."""
        await self._command(partial(inbox.WorkerCommand, CommandKind.RESTART))

    async def stop(self, drain_s: float, *, is_closing: bool = False, reason: Failure | None = None) -> None:
        """Stop the worker, after running sequences had `drain_s` to finish. With `is_closing` the worker never starts
        again.

        Requests that wait for the model fail with `reason`.
        """
        if not self._inbox.is_closed:
            await self._command(lambda waiter: inbox.StopWorker(waiter, drain_s, is_closing, reason))

    def change(self, spec: WorkerSpec, load_timeout_s: float, *, is_preload: bool, is_reload: bool) -> None:
        """Set a new specification. With `is_reload`, a running worker is replaced, which pauses its streams."""
        self._inbox.put(inbox.ChangeSpec(spec, load_timeout_s, is_preload, is_reload))

    def adopt(self, process: WorkerPort, epoch: int) -> None:
        """Adopt a process that an earlier gateway started. No other command may precede this one."""
        self._inbox.put(inbox.AdoptProcess(process, epoch))

    def kill(self) -> None:
        """Send the process SIGKILL at once."""
        if (process := self.incarnation.process) is not None:
            process.signal(signal.SIGKILL)

    async def _command(self, command: Callable[[Waiter], inbox.InboxMessage]) -> None:
        if self._inbox.is_closed:
            raise ModelUnavailable(SHUTTING_DOWN)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._inbox.put(command(waiter))
        await waiter

    # -- commands of the memory broker ---------------------------------------------------------------------------------

    def evict(self) -> bool:
        """Stop an idle worker to make room. Return False if it is not ready or has parked sequences."""
        if self.state is not State.READY or self.has_parked:
            return False
        self.close_gate()
        self._inbox.put(inbox.WorkerEvent(EventKind.EVICT, self.epoch))
        return True

    def recycle(self) -> None:
        """Order a replacement of the process, which will resume running sequences, and return at once."""
        self._inbox.put(inbox.WorkerEvent(EventKind.RECYCLE, self.epoch))

    def close_gate(self) -> None:
        """Make new requests wait from now on."""
        self.incarnation.is_gated = True

    def open_gate(self) -> None:
        if self.incarnation.is_gated:
            self.incarnation.is_gated = False
            self._inbox.put(inbox.WorkerEvent(EventKind.REOPEN, self.epoch))

    # -- waiting callers and sequences ---------------------------------------------------------------------------------

    @property
    def _is_wanted(self) -> bool:
        return self._has_demand or self.is_preload

    @property
    def _has_demand(self) -> bool:
        return self.incarnation.has_successor or self._waiters.has_any() or self.parked.has_any

    def _fail_waiting(self, failure: Failure) -> None:
        """Fail waiting callers and parked sequences."""
        self.parked.fail_all(failure)
        self._answer_waiters(failure)

    def _answer_waiters(self, failure: Failure | None) -> None:
        if failure is None:
            self._waiters.wake()
            return
        retry_after_s = self.retry_after_s
        if failure.is_retryable and not self.restart_policy.is_final:
            retry_after_s = max(1.0, retry_after_s)
        self._waiters.refuse(lambda: ModelUnavailable(failure, retry_after_s))
