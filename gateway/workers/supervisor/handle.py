"""Handle of a worker: what the pool, the memory broker and requests read of it and ask of it."""

import asyncio
import signal
from collections.abc import Callable
from functools import partial

from gateway.link.failover import ParkedSequences
from gateway.link.link import WorkerLink
from gateway.workers.supervisor import inbox
from gateway.workers.supervisor.inbox import CommandKind, EventKind, Waiter, Waiters, WorkerInbox
from gateway.workers.supervisor.incarnation import Incarnation
from gateway.workers.supervisor.ports import Effects, WorkerPort
from gateway.workers.supervisor.restart_policy import RestartPolicy
from gateway.workers.supervisor.state import (
    SHUTTING_DOWN,
    Events,
    ModelUnavailable,
    State,
    WorkerLimits,
    WorkerView,
)
from protocol.failures import Failure
from protocol.from_worker import Ready
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import Generate


class WorkerHandle:
    """The state of one model's worker, which `Worker` alone changes, and the commands that it takes from its inbox.

    Commands are handled in turn. What the very next request must see takes effect at once: the gate and the overload
    that the memory broker sets, and a send that failed.
    """

    incarnation: Incarnation

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        effects: Effects,
        link: WorkerLink,
        events: Events,
        limits: WorkerLimits,
        is_preload: bool,
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.is_preload = is_preload
        self.state = State.STOPPED
        self.since = effects.now()
        # The model was unloaded for others, or by its time to live: a preload counts as complete without it.
        self.was_evicted = False
        self.parked = ParkedSequences(spec.name, link, events, limits.resume, effects.now)
        self.restart_policy = RestartPolicy(spec.name)
        self._effects = effects
        self._events = events
        self._inbox = WorkerInbox()
        # Callers that wait for the model, and for its end.
        self._waiters = Waiters()
        self._stoppers = Waiters()

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether it takes new requests."""
        is_held = self.incarnation.is_unreachable or self.incarnation.is_gated or self.parked.is_isolating
        return self.state is State.READY and not is_held

    @property
    def is_resident(self) -> bool:
        """Whether the model is in memory, or on its way there."""
        return self.state in (State.STARTING, State.LOADING, State.READY)

    @property
    def has_parked(self) -> bool:
        """Whether sequences wait for a next worker, or for their turn at this one."""
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
        """The reason to refuse this request: there is no memory for it, it is known to crash workers, or it has a
        field that this worker is too old for."""
        if (overload := self.incarnation.overload) is not None:
            self._events.refused(self.name)
            return overload
        return self.incarnation.refusal(request) or self.parked.refusal(request)

    # -- commands ------------------------------------------------------------------------------------------------------

    async def ensure_ready(self) -> None:
        """Return when the model can take requests, at once if it can. Raises `ModelUnavailable`."""
        if not self.is_ready:
            await self._ask(partial(inbox.WorkerCommand, CommandKind.READY))

    async def load(self) -> None:
        """Like `ensure_ready`, and an operator's fresh try after failures."""
        await self._ask(partial(inbox.WorkerCommand, CommandKind.LOAD))

    async def restart(self) -> None:
        """Stop and start again; what runs goes on at the successor. Returns when ready. Raises `ModelUnavailable`."""
        await self._ask(partial(inbox.WorkerCommand, CommandKind.RESTART))

    async def stop(self, drain_s: float, *, is_closing: bool = False, reason: Failure | None = None) -> None:
        """Finish what runs until the deadline, then stop. `is_closing`: and never start again.

        `reason` is the failure of requests that wait for the model.
        """
        if not self._inbox.is_closed:
            await self._ask(lambda waiter: inbox.StopWorker(waiter, drain_s, is_closing, reason))

    def change(self, spec: WorkerSpec, load_timeout_s: float, *, is_preload: bool, is_reload: bool) -> None:
        """Use another specification from now on. With `is_reload` a running worker restarts, and its streams pause."""
        self._inbox.put(inbox.ChangeSpec(spec, load_timeout_s, is_preload, is_reload))

    def adopt(self, process: WorkerPort, epoch: int) -> None:
        """Take over a worker that an earlier gateway started. Must come before every other command."""
        self._inbox.put(inbox.AdoptProcess(process, epoch))

    def kill(self) -> None:
        """SIGKILL, without grace: the last resort of a daemon that must go now."""
        if (process := self.incarnation.process) is not None:
            process.signal(signal.SIGKILL)

    async def _ask(self, command: Callable[[Waiter], inbox.InboxMessage]) -> None:
        if self._inbox.is_closed:
            raise ModelUnavailable(SHUTTING_DOWN)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._inbox.put(command(waiter))
        await waiter

    # -- the memory broker's -------------------------------------------------------------------------------------------

    def evict(self) -> bool:
        """End it to make room, if it is ready; nothing of it may run. The next request waits for room again."""
        if self.state is not State.READY or self.has_parked:
            return False
        self.close_gate()
        self._inbox.put(inbox.WorkerEvent(EventKind.EVICT, self.epoch))
        return True

    def recycle(self) -> None:
        """Replace the process, without waiting for it; what runs goes on at the successor."""
        self._inbox.put(inbox.WorkerEvent(EventKind.RECYCLE, self.epoch))

    def close_gate(self) -> None:
        """Let new requests wait. Takes effect at once."""
        self.incarnation.is_gated = True

    def open_gate(self) -> None:
        if self.incarnation.is_gated:
            self.incarnation.is_gated = False
            self._inbox.put(inbox.WorkerEvent(EventKind.REOPEN, self.epoch))

    # -- demand, and the answers to it ---------------------------------------------------------------------------------

    @property
    def _is_asked_for(self) -> bool:
        return self._has_demand() or self.is_preload

    def _has_demand(self) -> bool:
        return self.incarnation.has_successor or self._waiters.has_any() or self.parked.has_any

    def _fail_waiting(self, failure: Failure) -> None:
        """Refuse all that wait for the model: callers, and parked sequences."""
        self.parked.fail_all(failure)
        self._answer_waiters(failure)

    def _answer_waiters(self, failure: Failure | None) -> None:
        """Answer the callers that wait for the model."""
        if failure is None:
            self._waiters.wake()
            return
        retry_after_s = self.retry_after_s
        if failure.is_retryable and not self.restart_policy.is_final:
            retry_after_s = max(1.0, retry_after_s)
        self._waiters.refuse(lambda: ModelUnavailable(failure, retry_after_s))
