"""State machine of one model's worker: the only place that decides what happens to it."""

import asyncio
import logging
from typing import assert_never

from gateway.supervisor import inbox
from gateway.supervisor.inbox import Inbox, Notice, Wish
from gateway.supervisor.incarnation import Incarnation
from gateway.supervisor.lifecycle import Lifecycle
from gateway.supervisor.ports import Effects, Process
from gateway.supervisor.state import SHUTTING_DOWN, Events, Limits, State
from gateway.supervisor.waiters import Waiter
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

log = logging.getLogger(__name__)


class Worker:
    """The worker of one model: dispatches commands, messages and alarms to transitions of its lifecycle.

    `run` is the single writer: it takes from one inbox and waits for nothing else. Callers wait on futures.
    Processes, time and chance come in through `Effects`. Others read the lifecycle through their `WorkerHandle`.
    """

    def __init__(self, lifecycle: Lifecycle, inbox: Inbox, effects: Effects, events: Events, limits: Limits) -> None:
        self.lifecycle = lifecycle
        self.name = lifecycle.name
        self._inbox = inbox
        self._effects = effects
        self._events = events
        self._limits = limits

    @property
    def _incarnation(self) -> Incarnation:
        return self.lifecycle.incarnation

    # -- the single writer -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the state until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self.lifecycle.timers.begin(tasks)
                while True:
                    item = await self._inbox.get()
                    try:
                        self._handle(item)
                    except Exception:  # The root of a worker's task: the model is given up, the task goes on.
                        log.exception("worker %s: internal error in state %s", self.name, self.lifecycle.state)
                        why = f"model '{self.name}' is not available: internal error"
                        self.lifecycle.give_up(Failure(Code.INTERNAL, why))
                        self.lifecycle.stoppers.wake()
        finally:
            self._leave()

    def _leave(self) -> None:
        """Refuse callers that wait, and later ones: the inbox is not handled any more."""
        self.lifecycle.is_closing = True
        for item in self._inbox.close():
            match item:
                case inbox.Ask(_, waiter):
                    self.lifecycle.waiters.add(waiter)
                case inbox.Stop(waiter):
                    self.lifecycle.stoppers.add(waiter)
                case _:
                    pass
        self.lifecycle.give_up(SHUTTING_DOWN)
        self.lifecycle.stoppers.wake()

    def _handle(self, item: inbox.Mail) -> None:
        incarnation = self._incarnation
        match item:
            case Pong():
                self._on_pong(item)
            case inbox.Beat():
                self._on_beat()
            case Hello() | Loading() | Ready() | Drained() | Goodbye() | AdaptersSet():
                # Fenced by the link already; this drops what was queued while the epoch changed.
                if item.epoch == incarnation.epoch and incarnation.process is not None:
                    self._on_message(item, incarnation.process)
            case inbox.Ask():
                self._on_ask(item)
            case inbox.Stop():
                self._on_stop(item)
            case inbox.Change():
                self._on_change(item)
            case inbox.Adopt(process, epoch):
                self._on_adopt(process, epoch)
            case inbox.About(notice, epoch):
                if epoch == incarnation.epoch:
                    self._on_notice(notice)
            case inbox.Admitted(epoch, share_bytes):
                if epoch == incarnation.epoch:
                    self.lifecycle.on_admitted(share_bytes)
            case inbox.Denied(epoch, failure):
                if epoch == incarnation.epoch:
                    self.lifecycle.on_denied(failure)
            case inbox.Exited(epoch, status):
                if epoch == incarnation.epoch and incarnation.process is not None:
                    self.lifecycle.on_exited(status, incarnation.process)
            case inbox.Alarm():
                if self.lifecycle.timers.is_current(item):
                    self._on_alarm()
            case _:
                assert_never(item)

    # -- commands ----------------------------------------------------------------------------------------------------

    def _on_ask(self, command: inbox.Ask) -> None:
        match command.wish:
            case Wish.READY:
                self._on_ensure(command.waiter)
            case Wish.LOAD:
                self._on_load(command.waiter)
            case Wish.RESTART:
                self._on_restart(command.waiter)

    def _on_notice(self, notice: Notice) -> None:
        is_ready = self.lifecycle.state is State.READY
        match notice:
            case Notice.EVICT if is_ready:
                self._incarnation.is_evicted = self.lifecycle.was_evicted = True
                self.lifecycle.terminate()
            case Notice.RECYCLE if is_ready:
                self.lifecycle.renew()
            case Notice.SUSPECT if is_ready:
                self.lifecycle.timers.arm(self._limits.suspect_s)
            case Notice.REOPEN:
                self.lifecycle.serve()
            case Notice.PROGRESS:
                self.lifecycle.parked.note_progress()
                self.lifecycle.serve()
            case Notice.EVICT | Notice.RECYCLE | Notice.SUSPECT:
                pass

    def _on_ensure(self, waiter: Waiter) -> None:
        self.lifecycle.waiters.add(waiter)
        if self.lifecycle.is_closing:
            self.lifecycle.wake(SHUTTING_DOWN)
            return
        match self.lifecycle.state:
            case State.READY:
                if self.lifecycle.is_ready:
                    self.lifecycle.wake(None)
            case State.STOPPED:
                self.lifecycle.start()
            case State.FAILED | State.INCOMPATIBLE:
                if self.lifecycle.restart_policy.may_start(self._effects.now()):
                    self.lifecycle.start()
                else:
                    self.lifecycle.wake(self.lifecycle.restart_policy.reason)
            case State.STARTING | State.LOADING | State.DRAINING | State.STOPPING | State.BACKOFF:
                pass

    def _on_load(self, waiter: Waiter) -> None:
        self.lifecycle.restart_policy.forgive()
        self._on_ensure(waiter)
        if self.lifecycle.state is State.BACKOFF:
            self.lifecycle.start()

    def _on_restart(self, waiter: Waiter) -> None:
        if not self.lifecycle.is_closing:
            # An operator's restart goes on when their connection does not.
            self._incarnation.has_successor = True
            if self.lifecycle.state in (State.READY, State.STARTING, State.LOADING):
                self.lifecycle.renew()
        self._on_load(waiter)

    def _on_stop(self, command: inbox.Stop) -> None:
        self.lifecycle.stoppers.add(command.waiter)
        self.lifecycle.is_closing |= command.is_closing
        self._incarnation.has_successor = False
        unloaded = command.reason or Failure(Code.DRAINING, f"model '{self.name}' was unloaded")
        self.lifecycle.give_up(SHUTTING_DOWN if self.lifecycle.is_closing else unloaded)
        match self.lifecycle.state:
            case State.READY:
                self.lifecycle.drain(command.drain_s)
            case State.DRAINING if command.drain_s > 0:
                self.lifecycle.timers.arm(command.drain_s)
            case State.STARTING | State.LOADING | State.DRAINING:
                self.lifecycle.terminate()
            case State.STOPPING:
                pass
            case State.STOPPED | State.BACKOFF | State.FAILED | State.INCOMPATIBLE:
                self.lifecycle.restart_policy.forgive()
                self.lifecycle.settle_stopped()

    def _on_change(self, command: inbox.Change) -> None:
        if command.spec.log_level != self.lifecycle.spec.log_level and self._incarnation.process is not None:
            self._incarnation.send(SetLogLevel(command.spec.log_level))
        is_other = command.spec.adapters != self.lifecycle.spec.adapters
        self.lifecycle.spec, self.lifecycle.is_preload = command.spec, command.is_preload
        self.lifecycle.load_timeout_s = command.load_timeout_s
        if not command.is_reload:
            if is_other:
                self._incarnation.set_adapters(command.spec.adapters)
            return
        match self.lifecycle.state:
            case State.READY | State.STARTING | State.LOADING:
                self.lifecycle.renew()
            case State.BACKOFF | State.FAILED | State.INCOMPATIBLE:
                # What was wrong may be what was changed.
                self.lifecycle.restart_policy.forgive()
                self.lifecycle.enter(State.STOPPED)
                self.lifecycle.start_on_demand()
            case State.STOPPED | State.STOPPING | State.DRAINING:
                pass

    def _on_adopt(self, process: Process, epoch: int) -> None:
        self.lifecycle.incarnation = self.lifecycle.make(epoch)
        self._incarnation.adopt(process)
        self.lifecycle.enter(State.STARTING)
        self.lifecycle.timers.arm(self._limits.adopt_s)
        self._incarnation.greet()

    # -- messages of the worker --------------------------------------------------------------------------------------

    def _on_message(self, message: Hello | Loading | Ready | Drained | Goodbye | AdaptersSet, process: Process) -> None:
        match message:
            case Hello():
                self._on_hello(message, process)
            case Loading():
                self._incarnation.loading = message
            case Ready():
                self._on_ready(message, process)
            case Drained():
                if self.lifecycle.state is State.DRAINING:
                    self.lifecycle.terminate()
                elif self._is_taking_over:
                    self.lifecycle.begin()
            case Goodbye():
                self._incarnation.goodbye = message
            case AdaptersSet():
                self._incarnation.note_adapters(message)

    def _on_hello(self, hello: Hello, process: Process) -> None:
        if hello.pid != process.pid:
            self._events.stale_message()
            log.warning("refused a second worker %s: pid %d, not %d", self._incarnation, hello.pid, process.pid)
        elif hello.proto_major != MAJOR:
            theirs, ours = f"{hello.proto_major}.{hello.proto_minor}", f"{MAJOR}.{MINOR}"
            if process.is_adopted:
                # Of the version before an upgrade: its model is loaded by one of ours.
                log.info("replacing worker %s: it speaks protocol %s, not %s", self._incarnation, theirs, ours)
                self._incarnation.has_successor = True
                self.lifecycle.terminate()
                return
            why = f"the worker of '{self.name}' speaks protocol {theirs} and the gateway {ours}; reinstall mlxd"
            self.lifecycle.terminate(Failure(Code.INCOMPATIBLE, why))
        elif self.lifecycle.state is State.STARTING:
            self._incarnation.minor = hello.proto_minor
            self.lifecycle.enter(State.LOADING)
            self.lifecycle.timers.arm(self.lifecycle.load_timeout_s)
            self._incarnation.greet()

    def _on_ready(self, ready: Ready, process: Process) -> None:
        if self.lifecycle.state not in (State.STARTING, State.LOADING):
            return
        if not process.is_adopted:
            self._events.load_seconds(self.name, ready.load_s)
        elif self._incarnation.ready is None:
            # What it still does is for clients that left with their gateway.
            self._incarnation.send(Drain(0.0))
            self.lifecycle.timers.arm(self._limits.adopt_s)
        self._incarnation.ready = ready
        if {(info.name, info.path) for info in ready.adapters} != set(self.lifecycle.spec.adapters):
            # They have changed while it loaded, or before this gateway was started.
            self._incarnation.set_adapters(self.lifecycle.spec.adapters)
        self._events.lane(self.name, ready.lane)
        if ready.lane_reason:
            log.warning("%s: %s", self.name, ready.lane_reason)
        if not process.is_adopted:
            self.lifecycle.begin()

    @property
    def _is_taking_over(self) -> bool:
        """An adopted worker has still to answer, or to end what it did for others."""
        has_answered = self.lifecycle.state is State.LOADING and self._incarnation.ready is not None
        return self._incarnation.is_adopted and (self.lifecycle.state is State.STARTING or has_answered)

    def _on_pong(self, pong: Pong) -> None:
        self.lifecycle.heartbeat.answered(self._effects.now())
        age_s = pong.stats.step_age_ms / 1000
        is_serving = self.lifecycle.state in (State.READY, State.DRAINING)
        if is_serving and pong.stats.running > 0 and age_s > self._limits.step_s:
            self.lifecycle.abort(f"its newest step is {age_s:.0f} s old")
        is_idle = not pong.stats.running and not pong.stats.waiting
        if self._incarnation.is_outgrown and is_idle and self.lifecycle.state is State.READY:
            log.info("replacing worker %s: requests need a later version of it", self._incarnation)
            self.lifecycle.renew()

    def _on_beat(self) -> None:
        now = self._effects.now()
        silence_s = self.lifecycle.heartbeat.beat(now)
        self.lifecycle.parked.tend(now)
        if self.lifecycle.state is State.READY and self.lifecycle.parked.has_stranded(now):
            # It lost touch with us for a while and ended what it had.
            self.lifecycle.parked.requeue()
        self.lifecycle.serve()
        is_unspawned = self.lifecycle.state is State.STARTING and self._incarnation.process is None
        if is_unspawned and not self.lifecycle.is_asked_for:
            # No request waits any more for the room that others would have to make.
            self.lifecycle.terminate()
        if self._incarnation.process is None or self.lifecycle.state is State.STOPPING:
            return
        self._incarnation.ping()
        if self.lifecycle.state in (State.READY, State.DRAINING) and silence_s > self._limits.pong_s:
            self.lifecycle.abort(f"no answer to pings for {silence_s:.0f} s")

    # -- alarms ------------------------------------------------------------------------------------------------------

    def _on_alarm(self) -> None:
        match self.lifecycle.state:
            case State.STARTING | State.LOADING if self._is_taking_over:
                log.warning("worker %s does not answer its new gateway and is replaced", self._incarnation)
                self.lifecycle.terminate()
            case State.STARTING | State.LOADING:
                why = f"model '{self.name}' was not loaded within {self.lifecycle.load_timeout_s:.0f} s"
                self._incarnation.send(Dump(0))
                self.lifecycle.terminate(Failure(Code.LOAD_TIMEOUT, why))
            case State.READY:
                self.lifecycle.abort("it cannot be reached")
            case State.DRAINING:
                self.lifecycle.terminate()
            case State.BACKOFF:
                self.lifecycle.enter(State.STOPPED)
                self.lifecycle.start_on_demand()
            case State.FAILED:
                self.lifecycle.start_on_demand()
            case State.STOPPED | State.STOPPING | State.INCOMPATIBLE:
                pass
