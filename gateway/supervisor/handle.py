"""A worker's public API: commands go to its inbox, results come back as futures."""

import asyncio
import logging
import signal
from collections.abc import Callable

from gateway.link.sequence import Connection, Flight
from gateway.supervisor import inbox
from gateway.supervisor.failover import ParkedSequences
from gateway.supervisor.inbox import Notice, Wish
from gateway.supervisor.ports import Effects, Process, Wire
from gateway.supervisor.restart_policy import RestartPolicy
from gateway.supervisor.state import Events, Limits, ModelUnavailable, State, WorkerView
from gateway.supervisor.waiters import Waiter, Waiters
from protocol.failures import Code, Failure
from protocol.messages import Generate, Loading, Ready
from protocol.spec import WorkerSpec
from protocol.stats import Stats

log = logging.getLogger(__name__)

SHUTTING_DOWN = Failure(Code.DRAINING, "the server is shutting down")


class Front:
    """A worker as its callers know it. `process.Worker` is what decides; it alone writes what is kept here."""

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        effects: Effects,
        wire: Wire,
        events: Events,
        limits: Limits,
        is_preload: bool = False,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.is_preload = is_preload
        self.state = State.STOPPED
        self.epoch = 0
        self.ready: Ready | None = None
        self.loading: Loading | None = None
        # Since when it has been ready.
        self.ready_at = 0.0
        # It was unloaded for others, or by its time to live: from then on no preload is missing when it is not there.
        self.has_left = False

        self._effects = effects
        self._events = events
        self._inbox: asyncio.Queue[inbox.Mail] = asyncio.Queue()
        self._waiters = Waiters()
        self._stoppers = Waiters()
        self._parked = ParkedSequences(spec.name, wire, events, limits)
        self._restart = RestartPolicy(spec.name)
        self._process: Process | None = None
        self._connection: Connection | None = None
        self._is_over = False
        self._is_suspect = False
        # Another model is to have its memory: what runs goes on, what comes waits.
        self._is_gated = False
        self._since = effects.now()

    # -- for everyone ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        is_held = self._is_suspect or self._is_gated or self._parked.is_isolating
        return self.state is State.READY and not is_held

    @property
    def is_serving(self) -> bool:
        return self.state is State.READY

    @property
    def is_resident(self) -> bool:
        """Whether the model is in memory, or on its way there."""
        return self.state in (State.STARTING, State.LOADING, State.READY)

    @property
    def last_failure(self) -> Failure | None:
        return self._restart.last_failure

    @property
    def restarts(self) -> int:
        return self._restart.restarts

    @property
    def overload(self) -> Failure | None:
        """The reason to refuse new requests although it is ready: there is no memory for more."""
        return self._effects.overload(self.name)

    @property
    def stats(self) -> Stats | None:
        return self._connection.stats if self._connection is not None else None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def ensure_ready(self) -> None:
        """Return when the model can take requests, at once if it can. Raises `ModelUnavailable`."""
        if not self.is_ready:
            await self._ask(lambda waiter: inbox.Ask(Wish.READY, waiter))

    async def load(self) -> None:
        """Like `ensure_ready`, and an operator's fresh try after failures."""
        await self._ask(lambda waiter: inbox.Ask(Wish.LOAD, waiter))

    async def stop(self, drain_s: float, *, is_closing: bool = False, reason: Failure | None = None) -> None:
        """Finish what runs until the deadline, then stop. `is_closing`: and never start again.

        `reason` is what those are told who wait for the model.
        """
        if not self._is_over:
            await self._ask(lambda waiter: inbox.Stop(waiter, drain_s, is_closing, reason))

    def change(self, spec: WorkerSpec, load_timeout_s: float, *, is_preload: bool, is_reload: bool) -> None:
        """Be another worker from now on. With `is_reload` one that runs is restarted, and its streams pause."""
        self._inbox.put_nowait(inbox.Change(spec, load_timeout_s, is_preload, is_reload))

    async def restart(self) -> None:
        """Stop and start again; what runs goes on at the successor. Returns when ready. Raises `ModelUnavailable`."""
        await self._ask(lambda waiter: inbox.Ask(Wish.RESTART, waiter))

    def adopt(self, process: Process, epoch: int) -> None:
        """Take over a worker that an earlier gateway started. Comes before everything else."""
        self._inbox.put_nowait(inbox.Adopt(process, epoch))

    def post(self, message: inbox.Message) -> None:
        """A message of the attached epoch, from the link."""
        self._inbox.put_nowait(message)

    def suspect(self) -> None:
        """A send failed. Takes effect at once: the retry must not be given this incarnation again."""
        self._is_suspect = True
        self._inbox.put_nowait(inbox.About(Notice.SUSPECT, self.epoch))

    def refusal(self, request: Generate) -> Failure | None:
        """Why this request must not be sent: it is known to kill workers, or there is no memory for it."""
        if (overload := self.overload) is not None:
            self._events.refused(self.name)
            return overload
        return self._parked.refusal(request, self._effects.now())

    def park(self, flight: Flight) -> None:
        """A sequence that this worker has given up; the next one goes on with it."""
        self._parked.park([flight], self._effects.now())

    def note_progress(self) -> None:
        """A watched sequence has its first token, or has ended."""
        self._inbox.put_nowait(inbox.About(Notice.PROGRESS, self.epoch))

    @property
    def has_parked(self) -> bool:
        """Whether sequences wait for a next worker, or for their turn at this one."""
        return self._parked.has_any or self._parked.is_isolating

    def close_gate(self) -> None:
        """Let new requests wait. Takes effect at once."""
        self._is_gated = True

    def open_gate(self) -> None:
        if self._is_gated:
            self._is_gated = False
            self._inbox.put_nowait(inbox.About(Notice.REOPEN, self.epoch))

    def evict(self) -> bool:
        """End it to make room, if it is ready; nothing of it may run. Whoever asks next waits for room for it."""
        if self.state is not State.READY or self.has_parked:
            return False
        self.close_gate()
        self._inbox.put_nowait(inbox.About(Notice.EVICT, self.epoch))
        return True

    def recycle(self) -> None:
        """Start it anew, without anybody waiting; what runs goes on at the successor."""
        self._inbox.put_nowait(inbox.About(Notice.RECYCLE, self.epoch))

    def kill(self) -> None:
        """SIGKILL, without grace: the last resort of a daemon that must go now."""
        if self._process is not None:
            self._process.signal(signal.SIGKILL)

    def view(self) -> WorkerView:
        now = self._effects.now()
        process, loading = self._process, self.loading
        return WorkerView(
            name=self.name,
            path=self.spec.path,
            state=self.state,
            epoch=self.epoch,
            pid=self.pid,
            is_adopted=process is not None and process.is_adopted,
            is_preload=self.is_preload and not self.has_left,
            ready=self.ready,
            stats=self.stats,
            stage=loading.stage if loading is not None else "",
            loaded_bytes=loading.done_bytes if loading is not None else 0,
            total_bytes=loading.total_bytes if loading is not None else 0,
            since_s=now - self._since,
            restarts=self._restart.restarts,
            last_failure=self._restart.last_failure,
            retry_after_s=self._retry_after_s(),
        )

    async def _ask(self, command: Callable[[Waiter], inbox.Mail]) -> None:
        if self._is_over:
            raise ModelUnavailable(SHUTTING_DOWN)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(command(waiter))
        await waiter

    def _retry_after_s(self) -> float:
        is_waiting = self.state in (State.BACKOFF, State.FAILED)
        return self._restart.wait_s(self._effects.now()) if is_waiting else 0.0

    def _forget(self) -> None:
        """What the incarnation before has said."""
        self.ready = self.loading = self._connection = None
