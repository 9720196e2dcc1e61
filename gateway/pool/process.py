"""One model's worker as a state machine: the only place that decides what happens to it."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable
from typing import Final, assert_never

from msgspec.structs import replace

from gateway.flight import Flight
from gateway.link import WorkerGone
from gateway.pool import mail, postmortem
from gateway.pool.backoff import HALF_OPEN_S, Breaker
from gateway.pool.chores import Chores
from gateway.pool.effects import Effects, Process, Wire
from gateway.pool.lot import Lot
from gateway.pool.pulse import Pulse
from gateway.pool.state import Events, Limits, ModelUnavailable, State, WorkerView
from gateway.pool.waiters import Waiter, Waiters
from protocol.failures import Code, Failure
from protocol.messages import (
    MAJOR,
    MINOR,
    Down,
    Drain,
    Drained,
    Dump,
    Generate,
    Goodbye,
    Hello,
    Loading,
    Pong,
    Ready,
    Shutdown,
    Stats,
    Welcome,
    WorkerSpec,
)

log = logging.getLogger(__name__)

# What `Events.worker_exit` is told when nobody knows: an adopted worker is not our child.
UNKNOWN_EXIT: Final = 255
SHUTTING_DOWN: Final = Failure(Code.DRAINING, "the server is shutting down")


class Worker:
    """The worker of one model, over all its incarnations.

    `run` is the single writer: it takes commands, messages and alarms from one queue and waits for nothing else.
    Whoever asked waits on a future, and every settled state (ready, stopped, backoff, failed, incompatible) wakes
    all of them. Processes, time and chance come in through `Effects`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        effects: Effects,
        wire: Wire,
        events: Events,
        limits: Limits,
        load_timeout_s: float = 600.0,
        is_preload: bool = False,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.is_preload = is_preload
        self.state = State.STOPPED
        self.epoch = 0
        self.ready: Ready | None = None
        self.stats: Stats | None = None
        self.loading: Loading | None = None
        self.last_failure: Failure | None = None
        self.restarts = 0
        # Requests that hold this worker: counted by `Pool.busy`.
        self.leases = 0

        self._effects = effects
        self._wire = wire
        self._events = events
        self._limits = limits
        self._load_timeout_s = load_timeout_s
        self._breaker = Breaker()
        self._inbox: asyncio.Queue[mail.Mail] = asyncio.Queue()
        self._waiters = Waiters()
        self._stoppers = Waiters()
        self._lot = Lot(spec.name, wire, events, limits)
        self._process: Process | None = None
        self._chores = Chores(effects, limits, self._inbox.put_nowait)
        self._goodbye: Goodbye | None = None
        # Why we are ending it ourselves; None while it lives, and when it was asked to stop.
        self._blame: Failure | None = None
        self._is_wanted = False
        self._is_closing = False
        self._is_over = False
        self._is_final = False
        self._is_suspect = False
        self._has_crashed = False
        self._since = self._ready_at = effects.now()
        self._pulse = Pulse(self._since, limits.blackout_s)
        self._retry_at = 0.0

    # -- for everyone ------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.state is State.READY and not self._is_suspect and not self._lot.is_trying

    @property
    def is_serving(self) -> bool:
        return self.state is State.READY

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    async def ensure_ready(self) -> None:
        """Return when the model can take requests, at once if it can. Raises `ModelUnavailable`."""
        if not self.is_ready:
            await self._ask(mail.Ensure)

    async def load(self) -> None:
        """Like `ensure_ready`, and an operator's fresh try after failures."""
        await self._ask(mail.Load)

    async def stop(self, drain_s: float, *, is_closing: bool = False) -> None:
        """Finish what runs until the deadline, then stop. `is_closing`: and never start again."""
        if not self._is_over:
            await self._ask(lambda waiter: mail.Stop(waiter, drain_s, is_closing))

    async def restart(self) -> None:
        """Stop and start again; what runs goes on at the successor. Returns when ready. Raises `ModelUnavailable`."""
        await self._ask(mail.Restart)

    def adopt(self, process: Process, epoch: int) -> None:
        """Take over a worker that an earlier gateway started. Comes before everything else."""
        self._inbox.put_nowait(mail.Adopt(process, epoch))

    def post(self, message: mail.Message) -> None:
        """A message of the attached epoch, from the link."""
        self._inbox.put_nowait(message)

    def suspect(self) -> None:
        """A send failed. Takes effect at once: the retry must not be given this incarnation again."""
        self._is_suspect = True
        self._inbox.put_nowait(mail.Suspect(self.epoch))

    def refusal(self, request: Generate) -> Failure | None:
        """Why this request must not be sent: it is known to kill workers."""
        return self._lot.refusal(request, self._effects.now())

    def park(self, flight: Flight) -> None:
        """A sequence that this worker has given up; the next one goes on with it."""
        self._lot.park([flight], self._effects.now())

    def acquit(self) -> None:
        """A watched sequence has its first token, or has ended."""
        self._inbox.put_nowait(mail.Acquit(self.epoch))

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
            is_preload=self.is_preload,
            ready=self.ready,
            stats=self.stats,
            stage=loading.stage if loading is not None else "",
            loaded_bytes=loading.done_bytes if loading is not None else 0,
            total_bytes=loading.total_bytes if loading is not None else 0,
            since_s=now - self._since,
            leases=self.leases,
            restarts=self.restarts,
            last_failure=self.last_failure,
            retry_after_s=self._retry_after_s(),
        )

    async def _ask(self, command: Callable[[Waiter], mail.Mail]) -> None:
        if self._is_over:
            raise ModelUnavailable(SHUTTING_DOWN)
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._inbox.put_nowait(command(waiter))
        await waiter

    # -- the single writer -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the state until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._chores.begin(tasks)
                while True:
                    item = await self._inbox.get()
                    try:
                        self._handle(item)
                    except Exception:
                        log.exception("worker %s: a fault of ours in state %s", self.name, self.state)
                        self._give_up(Failure(Code.INTERNAL, f"model '{self.name}' is not available: internal error"))
                        self._stoppers.wake()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Nobody handles the inbox any more: whoever waits, or comes later, must not wait for ever."""
        self._is_over = self._is_closing = True
        while not self._inbox.empty():
            match self._inbox.get_nowait():
                case mail.Ensure(waiter) | mail.Load(waiter) | mail.Restart(waiter):
                    self._waiters.add(waiter)
                case mail.Stop(waiter):
                    self._stoppers.add(waiter)
                case _:
                    pass
        self._give_up(SHUTTING_DOWN)
        self._stoppers.wake()

    def _handle(self, item: mail.Mail) -> None:
        match item:
            case Pong():
                self._on_pong(item)
            case mail.Beat():
                self._on_beat()
            case Hello() | Loading() | Ready() | Drained() | Goodbye():
                # Fenced by the link already; this drops what was queued while the epoch changed.
                if item.epoch == self.epoch and self._process is not None:
                    self._on_message(item, self._process)
            case mail.Ensure(waiter):
                self._on_ensure(waiter)
            case mail.Load(waiter):
                self._on_load(waiter)
            case mail.Restart(waiter):
                self._on_restart(waiter)
            case mail.Stop():
                self._on_stop(item)
            case mail.Adopt(process, epoch):
                self._on_adopt(process, epoch)
            case mail.Admitted(epoch):
                self._on_admitted(epoch)
            case mail.Exited(epoch, status):
                self._on_exited(epoch, status)
            case mail.Suspect(epoch):
                if epoch == self.epoch and self.state is State.READY:
                    self._chores.arm(self._limits.suspect_s)
            case mail.Acquit(epoch):
                if epoch == self.epoch:
                    self._lot.acquit()
                    self._serve()
            case mail.Alarm():
                if self._chores.is_current(item):
                    self._on_alarm()
            case _:
                assert_never(item)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _on_ensure(self, waiter: Waiter) -> None:
        self._waiters.add(waiter)
        if self._is_closing:
            self._wake(SHUTTING_DOWN)
            return
        match self.state:
            case State.READY:
                if self.is_ready:
                    self._wake(None)
            case State.STOPPED:
                self._start()
            case State.FAILED | State.INCOMPATIBLE:
                if self._is_final or self._effects.now() < self._retry_at:
                    self._wake(self._reason())
                else:
                    self._start()
            case State.STARTING | State.LOADING | State.DRAINING | State.STOPPING | State.BACKOFF:
                pass

    def _on_load(self, waiter: Waiter) -> None:
        self._forgive()
        self._on_ensure(waiter)
        if self.state is State.BACKOFF:
            self._start()

    def _on_restart(self, waiter: Waiter) -> None:
        if not self._is_closing:
            # An operator's restart goes on when their connection does not.
            self._is_wanted = True
            if self.state is State.READY:
                self._lot.park(self._wire.detach(self.epoch), self._effects.now())
                self._terminate()
            elif self.state in (State.STARTING, State.LOADING):
                self._terminate()
        self._on_load(waiter)

    def _on_stop(self, command: mail.Stop) -> None:
        self._stoppers.add(command.waiter)
        self._is_closing |= command.is_closing
        self._is_wanted = False
        unloaded = Failure(Code.DRAINING, f"model '{self.name}' was unloaded")
        self._give_up(SHUTTING_DOWN if self._is_closing else unloaded)
        match self.state:
            case State.READY:
                self._drain(command.drain_s)
            case State.DRAINING if command.drain_s > 0:
                self._chores.arm(command.drain_s)
            case State.STARTING | State.LOADING | State.DRAINING:
                self._terminate()
            case State.STOPPING:
                pass
            case State.STOPPED | State.BACKOFF | State.FAILED | State.INCOMPATIBLE:
                self._forgive()
                self._settle_stopped()

    def _on_adopt(self, process: Process, epoch: int) -> None:
        self.epoch = epoch
        self._process = process
        self._wire.attach(self)
        self._enter(State.STARTING)
        self._chores.arm(self._limits.adopt_s)
        self._chores.watch(epoch, process)
        self._chores.greet(self._try_welcome)

    # -- what the worker says ----------------------------------------------------------------------------------------

    def _on_message(self, message: Hello | Loading | Ready | Drained | Goodbye, process: Process) -> None:
        match message:
            case Hello():
                self._on_hello(message, process)
            case Loading():
                self.loading = message
            case Ready():
                self._on_ready(message, process)
            case Drained():
                if self.state is State.DRAINING:
                    self._terminate()
                elif self._is_taking_over:
                    self._begin()
            case Goodbye():
                self._goodbye = message

    def _on_hello(self, hello: Hello, process: Process) -> None:
        if hello.pid != process.pid:
            self._events.stale_message()
            log.warning("refused a second worker %s#%d: pid %d, not %d", self.name, self.epoch, hello.pid, process.pid)
        elif hello.proto_major != MAJOR:
            theirs, ours = f"{hello.proto_major}.{hello.proto_minor}", f"{MAJOR}.{MINOR}"
            why = f"the worker of '{self.name}' speaks protocol {theirs} and the gateway {ours}; reinstall mlxd"
            self._terminate(Failure(Code.INCOMPATIBLE, why))
        elif self.state is State.STARTING:
            self._enter(State.LOADING)
            self._chores.arm(self._load_timeout_s)
            self._chores.greet(self._try_welcome)

    def _on_ready(self, ready: Ready, process: Process) -> None:
        if self.state not in (State.STARTING, State.LOADING):
            return
        if not process.is_adopted:
            self._events.load_seconds(self.name, ready.load_s)
        elif self.ready is None:
            # What it still does is for clients that went away with their gateway.
            self._try_send(Drain(0.0))
            self._chores.arm(self._limits.adopt_s)
        self.ready = ready
        if not process.is_adopted:
            self._begin()

    @property
    def _is_taking_over(self) -> bool:
        """An adopted worker has still to answer, or to end what it did for others."""
        is_adopted = self._process is not None and self._process.is_adopted
        return is_adopted and (self.state is State.STARTING or (self.state is State.LOADING and self.ready is not None))

    def _begin(self) -> None:
        self.loading = None
        self._ready_at = self._effects.now()
        self._pulse.answered(self._ready_at)
        self._enter(State.READY)
        self._serve()

    def _on_pong(self, pong: Pong) -> None:
        self._pulse.answered(self._effects.now())
        age_s = pong.stats.step_age_ms / 1000
        if self.state in (State.READY, State.DRAINING) and pong.stats.running > 0 and age_s > self._limits.step_s:
            self._abort(f"its newest step is {age_s:.0f} s old")

    def _on_beat(self) -> None:
        now = self._effects.now()
        silence_s = self._pulse.beat(now)
        self._lot.keep(now)
        if self.state is State.READY and self._lot.is_forgotten(now):
            # It has lost touch with us for a while and ended what it had.
            self._lot.release()
        self._serve()
        if self._process is None or self.state is State.STOPPING:
            return
        self._wire.ping(self, time.monotonic_ns())
        if self.state in (State.READY, State.DRAINING) and silence_s > self._limits.pong_s:
            self._abort(f"no answer to pings for {silence_s:.0f} s")

    def _serve(self) -> None:
        """Those that lost their worker go first, then whoever waits for one."""
        if self.state is not State.READY or self._is_suspect:
            return
        if self._lot.is_trying:
            self._lot.send(self, self._effects.now())
        if self.is_ready:
            self._wake(None)

    # -- transitions -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self.restarts += self._has_crashed
        self.epoch = self._effects.next_epoch()
        self.ready = self.stats = self.loading = None
        self._goodbye = self._blame = None
        self._is_suspect = self._is_final = self._is_wanted = self._has_crashed = False
        self._enter(State.STARTING)
        self._chores.admit(replace(self.spec, epoch=self.epoch))

    def _on_admitted(self, epoch: int) -> None:
        if epoch != self.epoch or self.state is not State.STARTING:
            return
        self._wire.attach(self)
        try:
            self._process = self._effects.spawn(replace(self.spec, epoch=epoch))
        except OSError as error:
            self._wire.detach(epoch)
            self._settle_crashed(Failure(Code.INTERNAL, f"the worker of '{self.name}' cannot be started: {error}"))
            return
        self._chores.arm(self._load_timeout_s)
        self._chores.watch(epoch, self._process)

    def _on_alarm(self) -> None:
        match self.state:
            case State.STARTING | State.LOADING if self._is_taking_over:
                log.warning("worker %s#%d does not answer its new gateway and is replaced", self.name, self.epoch)
                self._terminate()
            case State.STARTING | State.LOADING:
                why = f"model '{self.name}' was not loaded within {self._load_timeout_s:.0f} s"
                self._try_send(Dump(0))
                self._terminate(Failure(Code.LOAD_TIMEOUT, why))
            case State.READY:
                self._abort("it cannot be reached")
            case State.DRAINING:
                self._terminate()
            case State.BACKOFF:
                self._enter(State.STOPPED)
                self._start_on_demand()
            case State.FAILED:
                self._start_on_demand()
            case State.STOPPED | State.STOPPING | State.INCOMPATIBLE:
                pass

    def _drain(self, drain_s: float) -> None:
        self._enter(State.DRAINING)
        if drain_s > 0 and self._try_send(Drain(drain_s)):
            # The worker keeps the deadline; ours is for a worker that does not.
            self._chores.arm(drain_s + 1.0)
        else:
            self._terminate()

    def _terminate(self, blame: Failure | None = None) -> None:
        """End the process gently. `blame` makes it a crash, and waiters are told at once."""
        self._blame = blame
        if blame is not None:
            self.last_failure = blame
            self._give_up(blame)
        self._chores.cancel_admission()
        if self._process is None:
            self._settle_stopped()
            return
        self._enter(State.STOPPING)
        term_s = self._limits.term_s if self._try_send(Shutdown()) else 0.0
        kill_s = self._limits.stop_grace_s(self.ready.weights_bytes if self.ready is not None else 0)
        self._chores.escalate(self._process, ((term_s, signal.SIGTERM), (max(0.0, kill_s - term_s), signal.SIGKILL)))

    def _abort(self, why: str) -> None:
        """End a stuck process, its stacks first. Its streams wait for the next one."""
        assert self._process is not None
        log.error("worker %s#%d is stuck: %s", self.name, self.epoch, why)
        self._events.stuck(self.name)
        self._blame = Failure(Code.WORKER_DIED, f"the worker of model '{self.name}' was stuck: {why}")
        self._enter(State.STOPPING)
        self._try_send(Dump(0))
        self._lot.park(self._wire.detach(self.epoch), self._effects.now())
        limits = self._limits
        self._chores.escalate(self._process, ((limits.dump_s, signal.SIGABRT), (limits.abort_s, signal.SIGKILL)))

    def _on_exited(self, epoch: int, status: int | None) -> None:
        process = self._process
        if epoch != self.epoch or process is None:
            return
        lines = process.last_lines()
        process.close()
        self._process = None
        self._chores.finish()
        self._events.worker_exit(self.name, UNKNOWN_EXIT if status is None else status)
        report = postmortem.examine(self.name, status, self._goodbye, lines)
        is_clean = report.kind is postmortem.Kind.STOPPED
        is_asked = self.state in (State.DRAINING, State.STOPPING) and (self._blame is None or self._stoppers.has_any())
        is_crash = not is_asked and not (is_clean and self._blame is None and self.ready is not None)
        self._lot.park(self._wire.detach(epoch), self._effects.now())
        if is_asked and not self._is_wanted:
            stopped = Failure(Code.DRAINING, f"model '{self.name}' was stopped")
            self._lot.fail(stopped if is_clean else report.stream_failure)
        elif is_crash and self.ready is not None:
            self._lot.judge(report.stream_failure, self._effects.now())
        else:
            self._lot.release()
        if not is_crash:
            log.info("worker %s#%d has stopped", self.name, epoch)
            self._settle_stopped()
            return
        failure = self._blame or report.failure
        log.error("worker %s#%d ended: %s\n%s", self.name, epoch, failure.message, "\n".join(lines[-20:]))
        if report.kind is postmortem.Kind.INCOMPATIBLE or failure.code is Code.INCOMPATIBLE:
            self._settle_final(State.INCOMPATIBLE, failure)
        elif report.kind is postmortem.Kind.FINAL:
            self._settle_final(State.FAILED, failure)
        else:
            self._settle_crashed(failure)

    # -- settled states: each wakes every waiter ---------------------------------------------------------------------

    def _settle_stopped(self) -> None:
        self._enter(State.STOPPED)
        self._stoppers.wake()
        if self._is_closing:
            self._give_up(SHUTTING_DOWN)
        elif self._has_demand():
            self._start()

    def _settle_final(self, state: State, failure: Failure) -> None:
        """Starting again cannot help until somebody changes something and says so."""
        self.last_failure = failure
        self._is_final = True
        self._enter(state)
        self._stoppers.wake()
        self._give_up(failure)

    def _settle_crashed(self, failure: Failure) -> None:
        now = self._effects.now()
        self.last_failure = failure
        self._has_crashed = True
        is_loading = self.ready is None
        self._breaker.crash(
            now,
            is_loading=is_loading,
            healthy_s=0.0 if is_loading else now - self._ready_at,
            is_useful=self.stats is not None and self.stats.generation_tokens > 0,
        )
        is_open = self._breaker.is_open(now)
        delay_s = HALF_OPEN_S if is_open else self._breaker.delay_s(self._effects.random())
        self._retry_at = now + delay_s
        self._stoppers.wake()
        if delay_s > 0:
            self._enter(State.FAILED if is_open else State.BACKOFF)
            self._chores.arm(delay_s)
            # Whoever is here waits for the next try, as those who come now do, unless it is too far away.
            if is_open or self._is_closing:
                self._give_up(failure)
        else:
            self._enter(State.STOPPED)
            self._start_on_demand()

    def _start_on_demand(self) -> None:
        if not self._is_closing and (self._has_demand() or self.is_preload):
            self._start()

    def _has_demand(self) -> bool:
        return self._is_wanted or self._waiters.has_any() or self._lot.has_any

    def _forgive(self) -> None:
        self._breaker.reset()
        self._is_final = False
        self._retry_at = 0.0

    def _reason(self) -> Failure:
        return self.last_failure or Failure(Code.INTERNAL, f"model '{self.name}' is not available")

    def _retry_after_s(self) -> float:
        if self.state not in (State.BACKOFF, State.FAILED) or self._is_final:
            return 0.0
        return max(0.0, self._retry_at - self._effects.now())

    def _give_up(self, failure: Failure) -> None:
        """Nobody need wait any longer, whether for a worker or for the next one."""
        self._lot.fail(failure)
        self._wake(failure)

    def _wake(self, failure: Failure | None) -> None:
        if failure is None:
            self._waiters.wake()
            return
        retry_after_s = self._retry_after_s()
        if failure.is_retryable and not self._is_final:
            retry_after_s = max(1.0, retry_after_s)
        self._waiters.refuse(lambda: ModelUnavailable(failure, retry_after_s))

    def _enter(self, state: State) -> None:
        log.info("worker %s#%d: %s -> %s", self.name, self.epoch, self.state, state)
        self.state = state
        self._since = self._effects.now()
        self._chores.disarm()
        self._events.state(self.name, state)

    def _try_send(self, message: Down) -> bool:
        try:
            self._wire.send(self, message)
        except WorkerGone:
            return False
        return True

    def _try_welcome(self) -> bool:
        return self._try_send(Welcome(MINOR, self._wire.boot, self._limits.heartbeat_s))
