"""Lifecycle of one model's worker: its state, its incarnations and every transition between states."""

import logging
import signal
from collections.abc import Callable
from typing import Final

from msgspec.structs import replace

from gateway.link.sequence import Runner
from gateway.supervisor import postmortem
from gateway.supervisor.exits import EXITS, Fate, cause_of
from gateway.supervisor.failover import ParkedSequences
from gateway.supervisor.heartbeat import Heartbeat
from gateway.supervisor.inbox import Mail
from gateway.supervisor.incarnation import Incarnation
from gateway.supervisor.ports import Effects, Process, Wire
from gateway.supervisor.restart_policy import RestartPolicy
from gateway.supervisor.state import SHUTTING_DOWN, Events, Limits, ModelUnavailable, State
from gateway.supervisor.timers import Timers
from gateway.supervisor.waiters import Waiters
from protocol.failures import Code, Failure
from protocol.messages import Drain, SetLogLevel
from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

# The status that `Events.worker_exit` is given for an adopted worker, which is not our child.
UNKNOWN_EXIT: Final = 255


class Lifecycle:
    """State of one model's worker over all its incarnations. Written by its `Worker`, which decides when; read by all.

    Every settled state (ready, stopped, backoff, failed, incompatible) wakes the callers that wait.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        runner: Runner,
        post: Callable[[Mail], None],
        *,
        effects: Effects,
        wire: Wire,
        events: Events,
        limits: Limits,
        load_timeout_s: float,
        is_preload: bool,
    ) -> None:
        self.spec = spec
        self.name = spec.name
        self.is_preload = is_preload
        self.state = State.STOPPED
        self.since = effects.now()
        # It was unloaded for others, or by its time to live: from then on a preload of it is not missing.
        self.was_evicted = False
        self.parked = ParkedSequences(spec.name, wire, events, limits)
        self.restart_policy = RestartPolicy(spec.name)

        self._runner = runner
        self._effects = effects
        self._wire = wire
        self._events = events
        self._limits = limits
        self.load_timeout_s = load_timeout_s
        self.waiters = Waiters()
        self.stoppers = Waiters()
        self.timers = Timers(effects, limits, post)
        self.heartbeat = Heartbeat(self.since, limits.blackout_s)
        self.is_closing = False
        # Epoch 0: none has been started yet.
        self.incarnation = self.make(0)

    @property
    def is_ready(self) -> bool:
        is_held = self.incarnation.is_suspect or self.incarnation.is_gated or self.parked.is_isolating
        return self.state is State.READY and not is_held

    @property
    def retry_after_s(self) -> float:
        is_waiting = self.state in (State.BACKOFF, State.FAILED)
        return self.restart_policy.wait_s(self._effects.now()) if is_waiting else 0.0

    def make(self, epoch: int) -> Incarnation:
        """A new incarnation, without a process yet."""
        return Incarnation(epoch, self._runner, self._wire, self._limits, self.timers.watchers())

    # -- start -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin the next incarnation, which waits for memory first."""
        self.restart_policy.started()
        self.incarnation = self.make(self._effects.next_epoch())
        self.enter(State.STARTING)
        self.incarnation.request_memory(replace(self.spec, epoch=self.incarnation.epoch))

    def on_admitted(self, share_bytes: int) -> None:
        """Spawn the process: there is memory for it."""
        if self.state is not State.STARTING:
            return
        spec = replace(self.spec, epoch=self.incarnation.epoch, memory_bytes=share_bytes)
        try:
            self.incarnation.spawn(self._effects, spec)
        except OSError as error:
            self._settle_crashed(Failure(Code.INTERNAL, f"the worker of '{self.name}' cannot be started: {error}"))
            return
        self.timers.arm(self.load_timeout_s)

    def on_denied(self, failure: Failure) -> None:
        """It does not fit, whatever is unloaded. The next request asks again: pins and budgets change."""
        if self.state is State.STARTING:
            self.restart_policy.last_failure = failure
            self.give_up(failure)
            self.settle_stopped()

    def begin(self) -> None:
        """Serve: the model is loaded."""
        incarnation = self.incarnation
        incarnation.loading = None
        incarnation.ready_at = self._effects.now()
        self.heartbeat.answered(incarnation.ready_at)
        self.enter(State.READY)
        if incarnation.is_adopted:
            # It was started under another configuration.
            incarnation.send(SetLogLevel(self.spec.log_level))
        self.serve()

    def serve(self) -> None:
        """Resume parked sequences, then wake the callers that wait for the model."""
        if self.state is not State.READY or self.incarnation.is_suspect:
            return
        if self.parked.is_isolating:
            self.parked.resume(self._runner, self._effects.now())
        if self.is_ready:
            self.wake(None)

    # -- end ---------------------------------------------------------------------------------------------------------

    def drain(self, drain_s: float) -> None:
        """Finish what runs until the deadline, then end the process."""
        self.enter(State.DRAINING)
        if drain_s > 0 and self.incarnation.send(Drain(drain_s)):
            # The worker keeps the deadline; ours is for a worker that does not.
            self.timers.arm(drain_s + 1.0)
        else:
            self.terminate()

    def terminate(self, blame: Failure | None = None) -> None:
        """End the process gently. `blame` makes it a crash, and waiters are told at once."""
        incarnation = self.incarnation
        incarnation.blame = blame
        if blame is not None:
            self.restart_policy.last_failure = blame
            self.give_up(blame)
        incarnation.cancel_memory()
        if incarnation.process is None:
            self.settle_stopped()
            return
        self.enter(State.STOPPING)
        incarnation.shut_down()

    def renew(self) -> None:
        """End this incarnation; what it does goes on at the next one."""
        self.incarnation.has_successor = True
        if self.state is State.READY:
            self._park()
        self.terminate()

    def abort(self, why: str) -> None:
        """End a stuck process. Its streams wait for the next one."""
        incarnation = self.incarnation
        log.error("worker %s is stuck: %s", incarnation, why)
        self._events.stuck(self.name)
        incarnation.blame = Failure(Code.WORKER_DIED, f"the worker of model '{self.name}' was stuck: {why}")
        self.enter(State.STOPPING)
        incarnation.abort()
        self._park()

    def _park(self) -> None:
        self.parked.park(self.incarnation.detach(), self._effects.now())

    def on_exited(self, status: int | None, process: Process) -> None:
        """Do what `EXITS` says of this exit."""
        incarnation = self.incarnation
        lines = incarnation.close(process)
        report = postmortem.examine(self.name, status, incarnation.goodbye, lines)
        blame, was_ready = incarnation.blame, incarnation.ready is not None
        is_asked = self.state in (State.DRAINING, State.STOPPING) and (blame is None or self.stoppers.has_any())
        is_replaced = incarnation.has_successor or incarnation.is_evicted
        # SIGTERM: it was leaving, and our reminder came when Python was already down.
        known_status = 0 if is_asked and status == -signal.SIGTERM else status
        self._events.worker_exit(self.name, UNKNOWN_EXIT if known_status is None else known_status)
        exit = EXITS[cause_of(report.kind, blame, is_asked=is_asked, is_replaced=is_replaced, was_ready=was_ready)]
        self._park()
        self._hand_on(exit.sequences if was_ready else exit.while_loading, report)
        if exit.next is State.STOPPED:
            log.info("worker %s has stopped", incarnation)
            self.settle_stopped()
            return
        failure = blame or report.failure
        report_lines = "\n".join([f"{failure.message}{postmortem.crash_report(status)}", *lines[-20:]])
        log.error("worker %s ended: %s", incarnation, report_lines)
        if exit.next is State.BACKOFF:
            self._settle_crashed(failure)
        else:
            self._settle_final(exit.next, failure)

    def _hand_on(self, fate: Fate, report: postmortem.Postmortem) -> None:
        match fate:
            case Fate.FAIL:
                is_clean = report.kind is postmortem.Kind.STOPPED
                stopped = Failure(Code.DRAINING, f"model '{self.name}' was stopped")
                self.parked.fail(stopped if is_clean else report.stream_failure)
            case Fate.RESUME:
                self.parked.requeue()
            case Fate.SUSPECT:
                self.parked.after_crash(report.stream_failure, self._effects.now())

    # -- settled states: each wakes every waiter -----------------------------------------------------------------------

    def settle_stopped(self) -> None:
        """Stopped, with no process. Starts again when the model is asked for."""
        self.enter(State.STOPPED)
        self.stoppers.wake()
        if self.is_closing:
            self.give_up(SHUTTING_DOWN)
        elif self._has_demand():
            self.start()

    def _settle_final(self, state: State, failure: Failure) -> None:
        self.restart_policy.ended(failure)
        self.enter(state)
        self.stoppers.wake()
        self.give_up(failure)

    def _settle_crashed(self, failure: Failure) -> None:
        now = self._effects.now()
        delay_s, is_open = self.restart_policy.crashed(
            failure,
            now,
            self._effects.random(),
            None if self.incarnation.ready is None else now - self.incarnation.ready_at,
            is_useful=self.incarnation.is_useful,
        )
        self.stoppers.wake()
        if delay_s > 0:
            self.enter(State.FAILED if is_open else State.BACKOFF)
            self.timers.arm(delay_s)
            # Callers wait for the next try, as later ones do, unless it is too far away.
            if is_open or self.is_closing:
                self.give_up(failure)
        else:
            self.enter(State.STOPPED)
            self.start_on_demand()

    def start_on_demand(self) -> None:
        """Start if the model is asked for, or is a preload."""
        if not self.is_closing and self.is_asked_for:
            self.start()

    @property
    def is_asked_for(self) -> bool:
        return self._has_demand() or self.is_preload

    def _has_demand(self) -> bool:
        return self.incarnation.has_successor or self.waiters.has_any() or self.parked.has_any

    def give_up(self, failure: Failure) -> None:
        """Refuse all that wait for the model: callers, and parked sequences."""
        self.parked.fail(failure)
        self.wake(failure)

    def wake(self, failure: Failure | None) -> None:
        """Answer the callers that wait for the model."""
        if failure is None:
            self.waiters.wake()
            return
        retry_after_s = self.retry_after_s
        if failure.is_retryable and not self.restart_policy.is_final:
            retry_after_s = max(1.0, retry_after_s)
        self.waiters.refuse(lambda: ModelUnavailable(failure, retry_after_s))

    def enter(self, state: State) -> None:
        """Change the state. Ends the alarm of the one before."""
        if state is not self.state:
            log.info("worker %s: %s -> %s", self.incarnation, self.state, state)
        self.state = state
        self.since = self._effects.now()
        self.timers.disarm()
        self._events.state(self.name, state)
        self._effects.entered(self.name, state)
