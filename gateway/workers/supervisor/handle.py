"""Handle of a worker, its public API: commands go to its inbox, results come back as futures."""

import asyncio
import signal
from collections.abc import Callable

from gateway.link.sequence import Sequence
from gateway.workers.supervisor import inbox
from gateway.workers.supervisor.inbox import CommandKind, EventKind, WorkerInbox
from gateway.workers.supervisor.ports import Effects, WorkerPort, WorkerWire
from gateway.workers.supervisor.state import (
    SHUTTING_DOWN,
    Events,
    ModelUnavailable,
    State,
    WorkerLimits,
    WorkerView,
)
from gateway.workers.supervisor.waiters import Waiter
from gateway.workers.supervisor.worker import Worker
from protocol.failures import Failure
from protocol.messages import Detokenize, Generate, Ready, Tokenize
from protocol.minors import PACE as PACE_MINOR
from protocol.spec import WorkerSpec
from protocol.stats import Stats


class WorkerHandle:
    """One model's worker as the pool, the memory broker, requests and the link know it.

    Commands are handled in turn by its state machine, which `run` runs. What must hold for the very next request
    (a send that failed, the memory gate, a parked sequence) takes effect at once.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        effects: Effects,
        wire: WorkerWire,
        events: Events,
        limits: WorkerLimits,
        load_timeout_s: float = 600.0,
        is_preload: bool = False,
    ) -> None:
        self.name = spec.name
        self._effects = effects
        self._events = events
        self._inbox = WorkerInbox()
        self._worker = Worker(
            spec,
            self,
            self._inbox,
            effects=effects,
            wire=wire,
            events=events,
            limits=limits,
            load_timeout_s=load_timeout_s,
            is_preload=is_preload,
        )

    async def run(self) -> None:
        """Run the state machine until cancelled."""
        await self._worker.run()

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        return self._worker.state

    @property
    def is_ready(self) -> bool:
        """Whether it takes new requests."""
        return self._worker.is_ready

    @property
    def is_serving(self) -> bool:
        return self._worker.state is State.READY

    @property
    def is_resident(self) -> bool:
        """Whether the model is in memory, or on its way there."""
        return self._worker.state in (State.STARTING, State.LOADING, State.READY)

    @property
    def is_adopted(self) -> bool:
        """Whether an earlier gateway started it."""
        return self._worker.incarnation.is_adopted

    @property
    def takes_pace(self) -> bool:
        """Whether it knows `SetPace`."""
        return self._worker.incarnation.minor >= PACE_MINOR

    @property
    def spec(self) -> WorkerSpec:
        return self._worker.spec

    @property
    def is_preload(self) -> bool:
        return self._worker.is_preload

    @property
    def epoch(self) -> int:
        return self._worker.incarnation.epoch

    @property
    def pid(self) -> int:
        return self._worker.incarnation.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes on this machine: several of a group."""
        return self._worker.incarnation.pids

    @property
    def ready(self) -> Ready | None:
        return self._worker.incarnation.ready

    @property
    def ready_at(self) -> float:
        return self._worker.incarnation.ready_at

    @property
    def stats(self) -> Stats | None:
        return self._worker.incarnation.stats

    @property
    def last_failure(self) -> Failure | None:
        return self._worker.restart_policy.last_failure

    @property
    def restarts(self) -> int:
        return self._worker.restart_policy.restarts

    @property
    def has_parked(self) -> bool:
        """Whether sequences wait for a next worker, or for their turn at this one."""
        return self._worker.parked.has_any or self._worker.parked.is_isolating

    @property
    def overload(self) -> Failure | None:
        """The reason to refuse new requests although it is ready: there is no memory for more."""
        return self._effects.overload(self.name)

    def view(self) -> WorkerView:
        worker, incarnation = self._worker, self._worker.incarnation
        loading = incarnation.loading
        return WorkerView(
            name=self.name,
            path=worker.spec.path,
            state=worker.state,
            epoch=incarnation.epoch,
            pid=incarnation.pid,
            is_adopted=incarnation.is_adopted,
            is_preload=worker.is_preload and not worker.was_evicted,
            ready=incarnation.ready,
            stats=incarnation.stats,
            stage=loading.stage if loading is not None else "",
            loaded_bytes=loading.done_bytes if loading is not None else 0,
            total_bytes=loading.total_bytes if loading is not None else 0,
            since_s=self._effects.now() - worker.since,
            restarts=self.restarts,
            last_failure=self.last_failure,
            retry_after_s=worker.retry_after_s,
        )

    # -- commands ----------------------------------------------------------------------------------------------------

    async def ensure_ready(self) -> None:
        """Return when the model can take requests, at once if it can. Raises `ModelUnavailable`."""
        if not self.is_ready:
            await self._ask(lambda waiter: inbox.WorkerCommand(CommandKind.READY, waiter))

    async def load(self) -> None:
        """Like `ensure_ready`, and an operator's fresh try after failures."""
        await self._ask(lambda waiter: inbox.WorkerCommand(CommandKind.LOAD, waiter))

    async def restart(self) -> None:
        """Stop and start again; what runs goes on at the successor. Returns when ready. Raises `ModelUnavailable`."""
        await self._ask(lambda waiter: inbox.WorkerCommand(CommandKind.RESTART, waiter))

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
        if (process := self._worker.incarnation.process) is not None:
            process.signal(signal.SIGKILL)

    # -- the memory broker's -----------------------------------------------------------------------------------------

    def close_gate(self) -> None:
        """Let new requests wait. Takes effect at once."""
        self._worker.incarnation.is_gated = True

    def open_gate(self) -> None:
        if self._worker.incarnation.is_gated:
            self._worker.incarnation.is_gated = False
            self._post_event(EventKind.REOPEN)

    def evict(self) -> bool:
        """End it to make room, if it is ready; nothing of it may run. The next request waits for room again."""
        if self.state is not State.READY or self.has_parked:
            return False
        self.close_gate()
        self._post_event(EventKind.EVICT)
        return True

    def recycle(self) -> None:
        """Replace the process, without waiting for it; what runs goes on at the successor."""
        self._post_event(EventKind.RECYCLE)

    # -- the link's --------------------------------------------------------------------------------------------------

    def post(self, message: inbox.Message) -> None:
        """A message of the attached epoch."""
        self._inbox.put(message)

    def suspect(self) -> None:
        """Report that a send failed. Takes effect at once: the retry must not be given this incarnation again."""
        self._worker.incarnation.is_suspect = True
        self._post_event(EventKind.SUSPECT)

    def addressed(self, request: Generate) -> Generate:
        """A worker is sent requests as they are."""
        return request

    def refusal(self, request: Generate) -> Failure | None:
        """The reason to refuse this request: it is known to crash workers, there is no memory for it,
        or it has a field that this worker is too old for."""
        if (overload := self.overload) is not None:
            self._events.refused(self.name)
            return overload
        worker = self._worker
        return worker.incarnation.refusal(request) or worker.parked.refusal(request, self._effects.now())

    def question_refusal(self, question: Tokenize | Detokenize) -> Failure | None:
        """The reason to refuse a question about tokens: it has a part that this worker is too old for."""
        return self._worker.incarnation.question_refusal(question)

    def park(self, sequence: Sequence) -> None:
        """Keep a sequence that this worker has given up, for the next one."""
        self._worker.parked.park([sequence], self._effects.now())

    def note_progress(self) -> None:
        """A watched sequence has its first token, or has ended."""
        self._post_event(EventKind.PROGRESS)

    def _post_event(self, kind: EventKind) -> None:
        self._inbox.put(inbox.WorkerEvent(kind, self.epoch))

    async def _ask(self, command: Callable[[Waiter], inbox.InboxMessage]) -> None:
        if self._inbox.is_closed:
            raise ModelUnavailable(SHUTTING_DOWN)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._inbox.put(command(waiter))
        await waiter
