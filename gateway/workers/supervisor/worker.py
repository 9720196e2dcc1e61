"""State machine of one model's worker: its states and every transition, from the first start to the last exit.

    STOPPED → STARTING → LOADING → READY → DRAINING → STOPPING → STOPPED, or BACKOFF, FAILED, INCOMPATIBLE after a crash

`run` is the single writer: it takes one message after another from the inbox and waits for nothing else. Callers wait
on futures, and the waits for memory, exits and delays are tasks that report to the inbox.
"""

import asyncio
import logging
import signal
from typing import Final, assert_never

from msgspec.structs import replace

from gateway.link.sequence import Runner
from gateway.workers.supervisor import inbox, postmortem
from gateway.workers.supervisor.exits import EXITS, SequenceAction, cause_of
from gateway.workers.supervisor.failover import ParkedSequences
from gateway.workers.supervisor.heartbeat import Heartbeat
from gateway.workers.supervisor.inbox import CommandKind, EventKind, WorkerInbox
from gateway.workers.supervisor.incarnation import Incarnation
from gateway.workers.supervisor.ports import Effects, WorkerPort, WorkerWire
from gateway.workers.supervisor.restart_policy import RestartPolicy
from gateway.workers.supervisor.state import SHUTTING_DOWN, Events, ModelUnavailable, State, WorkerLimits
from gateway.workers.supervisor.timers import Timers
from gateway.workers.supervisor.waiters import Waiter, Waiters
from protocol.failures import Code, Failure
from protocol.messages import (
    MAJOR,
    MINOR,
    AdaptersSet,
    Drain,
    Drained,
    Dump,
    Goodbye,
    Hello,
    Loading,
    Pong,
    Ready,
    SetLogLevel,
)
from protocol.spec import WorkerSpec

log = logging.getLogger(__name__)

# The status that `Events.worker_exit` is given for an adopted worker, which is not our child.
UNKNOWN_EXIT: Final = 255


class Worker:
    """The worker of one model over all its processes. Other modules use it through its `WorkerHandle`.

    Every settled state (ready, stopped, backoff, failed, incompatible) answers the callers that wait.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        runner: Runner,
        inbox: WorkerInbox,
        *,
        effects: Effects,
        wire: WorkerWire,
        events: Events,
        limits: WorkerLimits,
        load_timeout_s: float,
        is_preload: bool,
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.is_preload = is_preload
        self.state = State.STOPPED
        self.since = effects.now()
        # The model was unloaded for others, or by its time to live: a preload counts as complete without it.
        self.was_evicted = False
        self.parked = ParkedSequences(spec.name, wire, events, limits)
        self.restart_policy = RestartPolicy(spec.name)
        self._runner = runner
        self._inbox = inbox
        self._effects = effects
        self._wire = wire
        self._events = events
        self._limits = limits
        self._load_timeout_s = load_timeout_s
        self._waiters = Waiters()
        self._stoppers = Waiters()
        self._timers = Timers(effects, limits, inbox.put)
        self._heartbeat = Heartbeat(self.since, limits.blackout_s)
        self._is_closing = False
        # Epoch 0 means that no process has been started yet.
        self.incarnation = self._new_incarnation(0)

    @property
    def is_ready(self) -> bool:
        is_held = self.incarnation.is_suspect or self.incarnation.is_gated or self.parked.is_isolating
        return self.state is State.READY and not is_held

    @property
    def retry_after_s(self) -> float:
        is_waiting = self.state in (State.BACKOFF, State.FAILED)
        return self.restart_policy.wait_s(self._effects.now()) if is_waiting else 0.0

    # -- the single writer ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the state until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._timers.begin(tasks)
                while True:
                    item = await self._inbox.get()
                    try:
                        self._handle(item)
                    except Exception:  # The root of a worker's task: the model is given up, the task goes on.
                        log.exception("worker %s: internal error in state %s", self.name, self.state)
                        why = f"model '{self.name}' is not available: internal error"
                        self._fail_waiting(Failure(Code.INTERNAL, why))
                        self._stoppers.wake()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Refuse callers that wait, and later ones: the inbox is not handled any more."""
        self._is_closing = True
        for item in self._inbox.close():
            match item:
                case inbox.WorkerCommand(_, waiter):
                    self._waiters.add(waiter)
                case inbox.StopWorker(waiter):
                    self._stoppers.add(waiter)
                case _:
                    pass
        self._fail_waiting(SHUTTING_DOWN)
        self._stoppers.wake()

    def _handle(self, item: inbox.InboxMessage) -> None:
        incarnation = self.incarnation
        match item:
            case Pong():
                self._on_pong(item)
            case inbox.HeartbeatDue():
                self._on_beat()
            case Hello() | Loading() | Ready() | Drained() | Goodbye() | AdaptersSet():
                # Fenced by the link already; this drops what was queued while the epoch changed.
                if item.epoch == incarnation.epoch and incarnation.process is not None:
                    self._on_message(item, incarnation.process)
            case inbox.WorkerCommand():
                self._on_command(item)
            case inbox.StopWorker():
                self._on_stop(item)
            case inbox.ChangeSpec():
                self._on_change(item)
            case inbox.AdoptProcess(process, epoch):
                self._on_adopt(process, epoch)
            case inbox.WorkerEvent(kind, epoch):
                if epoch == incarnation.epoch:
                    self._on_event(kind)
            case inbox.MemoryGranted(epoch, share_bytes):
                if epoch == incarnation.epoch:
                    self._on_admitted(share_bytes)
            case inbox.MemoryDenied(epoch, failure):
                if epoch == incarnation.epoch:
                    self._on_denied(failure)
            case inbox.ProcessExited(epoch, status):
                if epoch == incarnation.epoch and incarnation.process is not None:
                    self._on_exited(status, incarnation.process)
            case inbox.AlarmDue():
                if self._timers.is_current(item):
                    self._on_alarm()
            case _:
                assert_never(item)

    # -- commands ------------------------------------------------------------------------------------------------------

    def _on_command(self, command: inbox.WorkerCommand) -> None:
        match command.kind:
            case CommandKind.READY:
                self._on_ensure(command.waiter)
            case CommandKind.LOAD:
                self._on_load(command.waiter)
            case CommandKind.RESTART:
                self._on_restart(command.waiter)

    def _on_ensure(self, waiter: Waiter) -> None:
        self._waiters.add(waiter)
        if self._is_closing:
            self._answer_waiters(SHUTTING_DOWN)
            return
        match self.state:
            case State.READY:
                if self.is_ready:
                    self._answer_waiters(None)
            case State.STOPPED:
                self._start()
            case State.FAILED | State.INCOMPATIBLE:
                if self.restart_policy.may_start(self._effects.now()):
                    self._start()
                else:
                    self._answer_waiters(self.restart_policy.reason)
            case State.STARTING | State.LOADING | State.DRAINING | State.STOPPING | State.BACKOFF:
                pass

    def _on_load(self, waiter: Waiter) -> None:
        self.restart_policy.reset()
        self._on_ensure(waiter)
        if self.state is State.BACKOFF:
            self._start()

    def _on_restart(self, waiter: Waiter) -> None:
        if not self._is_closing:
            # An operator's restart goes on when their connection does not.
            self.incarnation.has_successor = True
            if self.state in (State.READY, State.STARTING, State.LOADING):
                self._replace()
        self._on_load(waiter)

    def _on_stop(self, command: inbox.StopWorker) -> None:
        self._stoppers.add(command.waiter)
        self._is_closing |= command.is_closing
        self.incarnation.has_successor = False
        unloaded = command.reason or Failure(Code.DRAINING, f"model '{self.name}' was unloaded")
        self._fail_waiting(SHUTTING_DOWN if self._is_closing else unloaded)
        match self.state:
            case State.READY:
                self._drain(command.drain_s)
            case State.DRAINING if command.drain_s > 0:
                self._timers.arm(command.drain_s)
            case State.STARTING | State.LOADING | State.DRAINING:
                self._terminate()
            case State.STOPPING:
                pass
            case State.STOPPED | State.BACKOFF | State.FAILED | State.INCOMPATIBLE:
                self.restart_policy.reset()
                self._settle_stopped()

    def _on_change(self, command: inbox.ChangeSpec) -> None:
        if command.spec.log_level != self.spec.log_level and self.incarnation.process is not None:
            self.incarnation.send(SetLogLevel(command.spec.log_level))
        is_other = command.spec.adapters != self.spec.adapters
        self.spec, self.is_preload = command.spec, command.is_preload
        self._load_timeout_s = command.load_timeout_s
        if not command.is_reload:
            if is_other:
                self.incarnation.set_adapters(command.spec.adapters)
            return
        match self.state:
            case State.READY | State.STARTING | State.LOADING:
                self._replace()
            case State.BACKOFF | State.FAILED | State.INCOMPATIBLE:
                # What was wrong may be what was changed.
                self.restart_policy.reset()
                self._enter(State.STOPPED)
                self._start_on_demand()
            case State.STOPPED | State.STOPPING | State.DRAINING:
                pass

    def _on_adopt(self, process: WorkerPort, epoch: int) -> None:
        self.incarnation = self._new_incarnation(epoch)
        self.incarnation.adopt(process)
        self._enter(State.STARTING)
        self._timers.arm(self._limits.adopt_s)
        self.incarnation.greet()

    def _on_event(self, event: EventKind) -> None:
        is_ready = self.state is State.READY
        match event:
            case EventKind.EVICT if is_ready:
                self.incarnation.is_evicted = self.was_evicted = True
                self._terminate()
            case EventKind.RECYCLE if is_ready:
                self._replace()
            case EventKind.SUSPECT if is_ready:
                self._timers.arm(self._limits.suspect_s)
            case EventKind.GREETED:
                self._serve_when_routable()
            case EventKind.REOPEN:
                self._serve()
            case EventKind.PROGRESS:
                self.parked.note_progress()
                self._serve()
            case EventKind.EVICT | EventKind.RECYCLE | EventKind.SUSPECT:
                pass

    # -- start ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin the next incarnation, which waits for memory first."""
        self.restart_policy.started()
        self.incarnation = self._new_incarnation(self._effects.next_epoch())
        self._enter(State.STARTING)
        self.incarnation.request_memory(replace(self.spec, epoch=self.incarnation.epoch))

    def _on_admitted(self, share_bytes: int) -> None:
        """Spawn the process: there is memory for it."""
        if self.state is not State.STARTING:
            return
        spec = replace(self.spec, epoch=self.incarnation.epoch, memory_bytes=share_bytes)
        try:
            self.incarnation.spawn(spec)
        except OSError as error:
            self._settle_crashed(Failure(Code.INTERNAL, f"the worker of '{self.name}' cannot be started: {error}"))
            return
        self._timers.arm(self._load_timeout_s)

    def _on_denied(self, failure: Failure) -> None:
        """It does not fit, whatever is unloaded. The next request asks again: pins and budgets change."""
        if self.state is State.STARTING:
            self.restart_policy.last_failure = failure
            self._fail_waiting(failure)
            self._settle_stopped()

    def _on_message(
        self, message: Hello | Loading | Ready | Drained | Goodbye | AdaptersSet, process: WorkerPort
    ) -> None:
        match message:
            case Hello():
                self._on_hello(message, process)
            case Loading():
                self.incarnation.loading = message
            case Ready():
                self._on_ready(message, process)
            case Drained():
                if self.state is State.DRAINING:
                    self._terminate()
                elif self._is_taking_over:
                    self._begin_serving()
            case Goodbye():
                self.incarnation.goodbye = message
            case AdaptersSet():
                self.incarnation.note_adapters(message)

    def _on_hello(self, hello: Hello, process: WorkerPort) -> None:
        if hello.pid != process.pid:
            self._events.stale_message()
            log.warning("refused a second worker %s: pid %d, not %d", self.incarnation, hello.pid, process.pid)
        elif hello.proto_major != MAJOR:
            theirs, ours = f"{hello.proto_major}.{hello.proto_minor}", f"{MAJOR}.{MINOR}"
            if process.is_adopted:
                # Of the version before an upgrade: its model is loaded by one of ours.
                log.info("replacing worker %s: it speaks protocol %s, not %s", self.incarnation, theirs, ours)
                self.incarnation.has_successor = True
                self._terminate()
                return
            why = f"the worker of '{self.name}' speaks protocol {theirs} and the gateway {ours}; reinstall mlxd"
            self._terminate(Failure(Code.INCOMPATIBLE, why))
        elif self.state is State.STARTING:
            self.incarnation.minor = hello.proto_minor
            self._enter(State.LOADING)
            self._timers.arm(self._load_timeout_s)
            self.incarnation.greet()

    def _on_ready(self, ready: Ready, process: WorkerPort) -> None:
        if self.state not in (State.STARTING, State.LOADING):
            return
        if self.incarnation.ready is None and process.is_adopted:
            # What it still does is for clients that left with their gateway.
            self.incarnation.send(Drain(0.0))
            self._timers.arm(self._limits.adopt_s)
        elif self.incarnation.ready is None:
            self._events.load_seconds(self.name, ready.load_s)
        self.incarnation.ready = ready
        if {(info.name, info.path) for info in ready.adapters} != set(self.spec.adapters):
            # They have changed while it loaded, or before this gateway was started.
            self.incarnation.set_adapters(self.spec.adapters)
        self._events.lane(self.name, ready.lane)
        if ready.lane_reason:
            log.warning("%s: %s", self.name, ready.lane_reason)
        if not process.is_adopted:
            self._serve_when_routable()

    def _serve_when_routable(self) -> None:
        """Serve once the worker is loaded and greeted: its Ready may overtake the connection that takes requests."""
        incarnation = self.incarnation
        is_loaded = self.state is State.LOADING and incarnation.ready is not None
        if is_loaded and incarnation.is_greeted and not incarnation.is_adopted:
            self._begin_serving()

    @property
    def _is_taking_over(self) -> bool:
        """An adopted worker has still to answer, or to end what it did for others."""
        has_answered = self.state is State.LOADING and self.incarnation.ready is not None
        return self.incarnation.is_adopted and (self.state is State.STARTING or has_answered)

    def _begin_serving(self) -> None:
        """Serve: the model is loaded."""
        incarnation = self.incarnation
        incarnation.loading = None
        incarnation.ready_at = self._effects.now()
        self._heartbeat.answered(incarnation.ready_at)
        self._enter(State.READY)
        if incarnation.is_adopted:
            # It was started under another configuration.
            incarnation.send(SetLogLevel(self.spec.log_level))
        self._serve()

    def _serve(self) -> None:
        """Resume parked sequences, then wake the callers that wait for the model."""
        if self.state is not State.READY or self.incarnation.is_suspect:
            return
        if self.parked.is_isolating:
            self.parked.resume(self._runner, self._effects.now())
        if self.is_ready:
            self._answer_waiters(None)

    # -- heartbeat and alarms ------------------------------------------------------------------------------------------

    def _on_pong(self, pong: Pong) -> None:
        self._heartbeat.answered(self._effects.now())
        age_s = pong.stats.step_age_ms / 1000
        is_serving = self.state in (State.READY, State.DRAINING)
        if is_serving and pong.stats.running > 0 and age_s > self._limits.step_s:
            self._abort(f"its newest step is {age_s:.0f} s old")
        is_idle = not pong.stats.running and not pong.stats.waiting
        if self.incarnation.is_outgrown and is_idle and self.state is State.READY:
            log.info("replacing worker %s: requests need a later version of it", self.incarnation)
            self._replace()

    def _on_beat(self) -> None:
        now = self._effects.now()
        silence_s = self._heartbeat.beat(now)
        self.parked.expire(now)
        if self.state is State.READY and self.parked.has_stranded(now):
            # It lost touch with us for a while and ended what it had.
            self.parked.requeue()
        self._serve()
        is_unspawned = self.state is State.STARTING and self.incarnation.process is None
        if is_unspawned and not self._is_asked_for:
            # No request waits any more for the room that others would have to make.
            self._terminate()
        if self.incarnation.process is None or self.state is State.STOPPING:
            return
        self.incarnation.ping()
        if self.state in (State.READY, State.DRAINING) and silence_s > self._limits.pong_s:
            self._abort(f"no answer to pings for {silence_s:.0f} s")

    def _on_alarm(self) -> None:
        match self.state:
            case State.STARTING | State.LOADING if self._is_taking_over:
                log.warning("worker %s does not answer its new gateway and is replaced", self.incarnation)
                self._terminate()
            case State.STARTING | State.LOADING:
                why = f"model '{self.name}' was not loaded within {self._load_timeout_s:.0f} s"
                self.incarnation.send(Dump(0))
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

    # -- end -----------------------------------------------------------------------------------------------------------

    def _drain(self, drain_s: float) -> None:
        """Finish what runs until the deadline, then end the process."""
        self._enter(State.DRAINING)
        if drain_s > 0 and self.incarnation.send(Drain(drain_s)):
            # The worker keeps the deadline; ours is for a worker that does not.
            self._timers.arm(drain_s + 1.0)
        else:
            self._terminate()

    def _terminate(self, fault: Failure | None = None) -> None:
        """End the process gently. `fault` makes it a crash, and waiters are told at once."""
        incarnation = self.incarnation
        incarnation.fault = fault
        if fault is not None:
            self.restart_policy.last_failure = fault
            self._fail_waiting(fault)
        incarnation.cancel_memory()
        if incarnation.process is None:
            self._settle_stopped()
            return
        self._enter(State.STOPPING)
        incarnation.shut_down()

    def _replace(self) -> None:
        """End this incarnation; what it does goes on at the next one."""
        self.incarnation.has_successor = True
        if self.state is State.READY:
            self._park()
        self._terminate()

    def _abort(self, why: str) -> None:
        """End a stuck process. Its streams wait for the next one."""
        incarnation = self.incarnation
        log.error("worker %s is stuck: %s", incarnation, why)
        self._events.stuck(self.name)
        incarnation.fault = Failure(Code.WORKER_DIED, f"the worker of model '{self.name}' was stuck: {why}")
        self._enter(State.STOPPING)
        incarnation.abort()
        self._park()

    def _park(self) -> None:
        self.parked.park(self.incarnation.detach(), self._effects.now())

    def _on_exited(self, status: int | None, process: WorkerPort) -> None:
        """Do what `EXITS` says of this exit."""
        incarnation = self.incarnation
        lines = incarnation.close(process)
        report = postmortem.examine(self.name, status, incarnation.goodbye, lines, process.failure())
        fault, was_ready = incarnation.fault, incarnation.ready is not None
        is_asked = self.state in (State.DRAINING, State.STOPPING) and (fault is None or self._stoppers.has_any())
        is_replaced = incarnation.has_successor or incarnation.is_evicted
        # SIGTERM: it was leaving, and our reminder came when Python was already down.
        known_status = 0 if is_asked and status == -signal.SIGTERM else status
        self._events.worker_exit(self.name, UNKNOWN_EXIT if known_status is None else known_status)
        exit = EXITS[cause_of(report.kind, fault, is_asked=is_asked, is_replaced=is_replaced, was_ready=was_ready)]
        self._park()
        self._dispose_of_parked(exit.sequences if was_ready else exit.while_loading, report)
        if exit.next is State.STOPPED:
            log.info("worker %s has stopped", incarnation)
            self._settle_stopped()
            return
        failure = fault or report.failure
        report_lines = "\n".join([f"{failure.message}{postmortem.crash_report(status)}", *lines[-20:]])
        log.error("worker %s ended: %s", incarnation, report_lines)
        if exit.next is State.BACKOFF:
            self._settle_crashed(failure)
        else:
            self._settle_final(exit.next, failure)

    def _dispose_of_parked(self, action: SequenceAction, report: postmortem.Postmortem) -> None:
        match action:
            case SequenceAction.FAIL:
                is_clean = report.kind is postmortem.ExitKind.STOPPED
                stopped = Failure(Code.DRAINING, f"model '{self.name}' was stopped")
                self.parked.fail(stopped if is_clean else report.stream_failure)
            case SequenceAction.RESUME:
                self.parked.requeue()
            case SequenceAction.SUSPECT:
                self.parked.after_crash(report.stream_failure, self._effects.now())

    # -- settled states: each answers every waiter ---------------------------------------------------------------------

    def _settle_stopped(self) -> None:
        """Stopped, with no process. Starts again when the model is asked for."""
        self._enter(State.STOPPED)
        self._stoppers.wake()
        if self._is_closing:
            self._fail_waiting(SHUTTING_DOWN)
        elif self._has_demand():
            self._start()

    def _settle_final(self, state: State, failure: Failure) -> None:
        self.restart_policy.ended(failure)
        self._enter(state)
        self._stoppers.wake()
        self._fail_waiting(failure)

    def _settle_crashed(self, failure: Failure) -> None:
        now = self._effects.now()
        delay_s, is_open = self.restart_policy.crashed(
            failure,
            now,
            self._effects.random(),
            None if self.incarnation.ready is None else now - self.incarnation.ready_at,
            is_useful=self.incarnation.is_useful,
        )
        self._stoppers.wake()
        if delay_s > 0:
            self._enter(State.FAILED if is_open else State.BACKOFF)
            self._timers.arm(delay_s)
            # Callers wait for the next try, as later ones do, unless it is too far away.
            if is_open or self._is_closing:
                self._fail_waiting(failure)
        else:
            self._enter(State.STOPPED)
            self._start_on_demand()

    def _start_on_demand(self) -> None:
        """Start if the model is asked for, or is a preload."""
        if not self._is_closing and self._is_asked_for:
            self._start()

    @property
    def _is_asked_for(self) -> bool:
        return self._has_demand() or self.is_preload

    def _has_demand(self) -> bool:
        return self.incarnation.has_successor or self._waiters.has_any() or self.parked.has_any

    def _fail_waiting(self, failure: Failure) -> None:
        """Refuse all that wait for the model: callers, and parked sequences."""
        self.parked.fail(failure)
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

    def _enter(self, state: State) -> None:
        """Change the state. Ends the alarm of the one before."""
        if state is not self.state:
            log.info("worker %s: %s -> %s", self.incarnation, self.state, state)
        self.state = state
        self.since = self._effects.now()
        self._timers.disarm()
        self._events.state(self.name, state)
        self._effects.entered(self.name, state)

    def _new_incarnation(self, epoch: int) -> Incarnation:
        return Incarnation(
            epoch, self._runner, self._wire, self._effects, self._limits, self._inbox.put, self._timers.run
        )
