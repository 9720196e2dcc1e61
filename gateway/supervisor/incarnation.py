"""The incarnations of one model's worker: how each begins, how it ends, and what follows."""

import logging
import signal
from typing import Final

from msgspec.structs import replace

from gateway.link.link import WorkerGone
from gateway.supervisor import postmortem
from gateway.supervisor.exits import EXITS, Fate, cause_of
from gateway.supervisor.handle import SHUTTING_DOWN, Front
from gateway.supervisor.heartbeat import Heartbeat
from gateway.supervisor.ports import Effects, Wire
from gateway.supervisor.state import Events, Limits, ModelUnavailable, State
from gateway.supervisor.timers import Timers
from protocol.failures import Code, Failure
from protocol.messages import MINOR, Down, Drain, Dump, Goodbye, SetLogLevel, Shutdown, Welcome
from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

# What `Events.worker_exit` is told when nobody knows: an adopted worker is not our child.
UNKNOWN_EXIT: Final = 255


class Life(Front):
    """What a worker's state machine does; `process.Worker` decides when. Called by the single writer only."""

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
        super().__init__(spec, effects=effects, wire=wire, events=events, limits=limits, is_preload=is_preload)
        self._wire = wire
        self._limits = limits
        self._load_timeout_s = load_timeout_s
        self._timers = Timers(effects, limits, self._inbox.put_nowait)
        self._goodbye: Goodbye | None = None
        # Why we are ending it ourselves; None while it lives, and when it was asked to stop.
        self._blame: Failure | None = None
        self._is_wanted = False
        self._is_closing = False
        # Ended to make room: who waits then goes on when there is room again.
        self._is_evicted = False
        self._heartbeat = Heartbeat(self._since, limits.blackout_s)

    # -- beginnings ----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.loading = None
        self.ready_at = self._effects.now()
        self._heartbeat.answered(self.ready_at)
        self._enter(State.READY)
        if self._process is not None and self._process.is_adopted:
            # It was started under another configuration.
            self._try_send(SetLogLevel(self.spec.log_level))
        self._serve()

    def _serve(self) -> None:
        """Those that lost their worker go first, then whoever waits for one."""
        if self.state is not State.READY or self._is_suspect:
            return
        if self._parked.is_isolating:
            self._parked.resume(self, self._effects.now())
        if self.is_ready:
            self._wake(None)

    def _start(self) -> None:
        self._restart.started()
        self.epoch = self._effects.next_epoch()
        self._forget()
        self._goodbye = self._blame = None
        self._is_suspect = self._is_wanted = self._is_evicted = self._is_gated = False
        self._enter(State.STARTING)
        self._timers.admit(replace(self.spec, epoch=self.epoch))

    def _on_admitted(self, epoch: int, share_bytes: int) -> None:
        if epoch != self.epoch or self.state is not State.STARTING:
            return
        self._connection = self._wire.attach(self)
        try:
            self._process = self._effects.spawn(replace(self.spec, epoch=epoch, memory_bytes=share_bytes))
        except OSError as error:
            self._wire.detach(epoch)
            self._settle_crashed(Failure(Code.INTERNAL, f"the worker of '{self.name}' cannot be started: {error}"))
            return
        self._timers.arm(self._load_timeout_s)
        self._timers.watch(epoch, self._process)

    def _on_denied(self, epoch: int, failure: Failure) -> None:
        """It does not fit, whatever is unloaded. The next request asks again: pins and budgets change."""
        if epoch == self.epoch and self.state is State.STARTING:
            self._restart.last_failure = failure
            self._give_up(failure)
            self._settle_stopped()

    # -- ends ----------------------------------------------------------------------------------------------------

    def _drain(self, drain_s: float) -> None:
        self._enter(State.DRAINING)
        if drain_s > 0 and self._try_send(Drain(drain_s)):
            # The worker keeps the deadline; ours is for a worker that does not.
            self._timers.arm(drain_s + 1.0)
        else:
            self._terminate()

    def _terminate(self, blame: Failure | None = None) -> None:
        """End the process gently. `blame` makes it a crash, and waiters are told at once."""
        self._blame = blame
        if blame is not None:
            self._restart.last_failure = blame
            self._give_up(blame)
        self._timers.cancel_admission()
        if self._process is None:
            self._settle_stopped()
            return
        self._enter(State.STOPPING)
        term_s = self._limits.term_s if self._try_send(Shutdown()) else 0.0
        kill_s = self._limits.stop_grace_s(self.ready.weights_bytes if self.ready is not None else 0)
        self._timers.escalate(self._process, ((term_s, signal.SIGTERM), (max(0.0, kill_s - term_s), signal.SIGKILL)))

    def _abort(self, why: str) -> None:
        """End a stuck process, its stacks first. Its streams wait for the next one."""
        assert self._process is not None
        log.error("worker %s#%d is stuck: %s", self.name, self.epoch, why)
        self._events.stuck(self.name)
        self._blame = Failure(Code.WORKER_DIED, f"the worker of model '{self.name}' was stuck: {why}")
        self._enter(State.STOPPING)
        self._try_send(Dump(0))
        self._parked.park(self._wire.detach(self.epoch), self._effects.now())
        limits = self._limits
        self._timers.escalate(self._process, ((limits.dump_s, signal.SIGABRT), (limits.abort_s, signal.SIGKILL)))

    def _on_exited(self, epoch: int, status: int | None) -> None:
        process = self._process
        if epoch != self.epoch or process is None:
            return
        lines = process.last_lines()
        process.close()
        self._process = None
        self._timers.finish()
        report = postmortem.examine(self.name, status, self._goodbye, lines)
        is_asked = self.state in (State.DRAINING, State.STOPPING) and (self._blame is None or self._stoppers.has_any())
        # SIGTERM: it was leaving, and our reminder came when Python was already down.
        told = 0 if is_asked and status == -signal.SIGTERM else status
        self._events.worker_exit(self.name, UNKNOWN_EXIT if told is None else told)
        was_ready = self.ready is not None
        is_replaced = self._is_wanted or self._is_evicted
        cause = cause_of(report.kind, self._blame, is_asked=is_asked, is_replaced=is_replaced, was_ready=was_ready)
        exit = EXITS[cause]
        self._parked.park(self._wire.detach(epoch), self._effects.now())
        self._hand_on(exit.sequences if was_ready else exit.while_loading, report)
        if exit.next is State.STOPPED:
            log.info("worker %s#%d has stopped", self.name, epoch)
            self._settle_stopped()
            return
        failure = self._blame or report.failure
        told_lines = "\n".join([f"{failure.message}{postmortem.crash_report(status)}", *lines[-20:]])
        log.error("worker %s#%d ended: %s", self.name, epoch, told_lines)
        if exit.next is State.BACKOFF:
            self._settle_crashed(failure)
        else:
            self._settle_final(exit.next, failure)

    def _hand_on(self, fate: Fate, report: postmortem.Postmortem) -> None:
        match fate:
            case Fate.FAIL:
                is_clean = report.kind is postmortem.Kind.STOPPED
                stopped = Failure(Code.DRAINING, f"model '{self.name}' was stopped")
                self._parked.fail(stopped if is_clean else report.stream_failure)
            case Fate.RESUME:
                self._parked.requeue()
            case Fate.SUSPECT:
                self._parked.after_crash(report.stream_failure, self._effects.now())

    # -- settled states: each wakes every waiter -----------------------------------------------------------------------

    def _settle_stopped(self) -> None:
        self._enter(State.STOPPED)
        self._stoppers.wake()
        if self._is_closing:
            self._give_up(SHUTTING_DOWN)
        elif self._has_demand():
            self._start()

    def _settle_final(self, state: State, failure: Failure) -> None:
        self._restart.ended(failure)
        self._enter(state)
        self._stoppers.wake()
        self._give_up(failure)

    def _settle_crashed(self, failure: Failure) -> None:
        now = self._effects.now()
        delay_s, is_open = self._restart.crashed(
            failure,
            now,
            self._effects.random(),
            None if self.ready is None else now - self.ready_at,
            is_useful=self.stats is not None and self.stats.generation_tokens > 0,
        )
        self._stoppers.wake()
        if delay_s > 0:
            self._enter(State.FAILED if is_open else State.BACKOFF)
            self._timers.arm(delay_s)
            # Whoever is here waits for the next try, as those who come now do, unless it is too far away.
            if is_open or self._is_closing:
                self._give_up(failure)
        else:
            self._enter(State.STOPPED)
            self._start_on_demand()

    def _start_on_demand(self) -> None:
        if not self._is_closing and self._is_asked_for:
            self._start()

    @property
    def _is_asked_for(self) -> bool:
        return self._has_demand() or self.is_preload

    def _has_demand(self) -> bool:
        return self._is_wanted or self._waiters.has_any() or self._parked.has_any

    def _give_up(self, failure: Failure) -> None:
        """Nobody need wait any longer, whether for a worker or for the next one."""
        self._parked.fail(failure)
        self._wake(failure)

    def _wake(self, failure: Failure | None) -> None:
        if failure is None:
            self._waiters.wake()
            return
        retry_after_s = self._retry_after_s()
        if failure.is_retryable and not self._restart.is_final:
            retry_after_s = max(1.0, retry_after_s)
        self._waiters.refuse(lambda: ModelUnavailable(failure, retry_after_s))

    def _enter(self, state: State) -> None:
        if state is not self.state:
            log.info("worker %s#%d: %s -> %s", self.name, self.epoch, self.state, state)
        self.state = state
        self._since = self._effects.now()
        self._timers.disarm()
        self._events.state(self.name, state)
        self._effects.entered(self.name, state)

    def _try_send(self, message: Down) -> bool:
        try:
            self._wire.send(self, message)
        except WorkerGone:
            return False
        return True

    def _try_welcome(self) -> bool:
        return self._try_send(Welcome(MINOR, self._wire.boot, self._limits.heartbeat_s))
