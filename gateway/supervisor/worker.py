"""One model's worker as a state machine: the only place that decides what happens to it."""

import asyncio
import logging
import time
from typing import assert_never

from gateway.supervisor import inbox
from gateway.supervisor.handle import SHUTTING_DOWN
from gateway.supervisor.inbox import Notice, Wish
from gateway.supervisor.incarnation import Life
from gateway.supervisor.ports import Process
from gateway.supervisor.state import State
from gateway.supervisor.waiters import Waiter
from protocol.failures import Code, Failure
from protocol.messages import (
    MAJOR,
    MINOR,
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


class Worker(Life):
    """The worker of one model, over all its incarnations.

    `run` is the single writer: it takes commands, messages and alarms from one queue and waits for nothing else.
    Whoever asked waits on a future, and every settled state (ready, stopped, backoff, failed, incompatible) wakes
    all of them. Processes, time and chance come in through `Effects`.
    """

    # -- the single writer -------------------------------------------------------------------------------------------

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
                case inbox.Ask(_, waiter):
                    self._waiters.add(waiter)
                case inbox.Stop(waiter):
                    self._stoppers.add(waiter)
                case _:
                    pass
        self._give_up(SHUTTING_DOWN)
        self._stoppers.wake()

    def _handle(self, item: inbox.Mail) -> None:
        match item:
            case Pong():
                self._on_pong(item)
            case inbox.Beat():
                self._on_beat()
            case Hello() | Loading() | Ready() | Drained() | Goodbye():
                # Fenced by the link already; this drops what was queued while the epoch changed.
                if item.epoch == self.epoch and self._process is not None:
                    self._on_message(item, self._process)
            case inbox.Ask():
                self._on_ask(item)
            case inbox.Stop():
                self._on_stop(item)
            case inbox.Change():
                self._on_change(item)
            case inbox.Adopt(process, epoch):
                self._on_adopt(process, epoch)
            case inbox.About(notice, epoch):
                if epoch == self.epoch:
                    self._on_notice(notice)
            case inbox.Admitted(epoch, share_bytes):
                self._on_admitted(epoch, share_bytes)
            case inbox.Denied(epoch, failure):
                self._on_denied(epoch, failure)
            case inbox.Exited(epoch, status):
                self._on_exited(epoch, status)
            case inbox.Alarm():
                if self._timers.is_current(item):
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
        is_ready = self.state is State.READY
        match notice:
            case Notice.EVICT if is_ready:
                self._is_evicted = self.has_left = True
                self._terminate()
            case Notice.RECYCLE if is_ready:
                self._renew()
            case Notice.SUSPECT if is_ready:
                self._timers.arm(self._limits.suspect_s)
            case Notice.REOPEN:
                self._serve()
            case Notice.PROGRESS:
                self._parked.note_progress()
                self._serve()
            case Notice.EVICT | Notice.RECYCLE | Notice.SUSPECT:
                pass

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
                if self._restart.may_start(self._effects.now()):
                    self._start()
                else:
                    self._wake(self._restart.reason)
            case State.STARTING | State.LOADING | State.DRAINING | State.STOPPING | State.BACKOFF:
                pass

    def _on_load(self, waiter: Waiter) -> None:
        self._restart.forgive()
        self._on_ensure(waiter)
        if self.state is State.BACKOFF:
            self._start()

    def _on_restart(self, waiter: Waiter) -> None:
        if not self._is_closing:
            # An operator's restart goes on when their connection does not.
            self._is_wanted = True
            if self.state in (State.READY, State.STARTING, State.LOADING):
                self._renew()
        self._on_load(waiter)

    def _on_stop(self, command: inbox.Stop) -> None:
        self._stoppers.add(command.waiter)
        self._is_closing |= command.is_closing
        self._is_wanted = False
        unloaded = command.reason or Failure(Code.DRAINING, f"model '{self.name}' was unloaded")
        self._give_up(SHUTTING_DOWN if self._is_closing else unloaded)
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
                self._restart.forgive()
                self._settle_stopped()

    def _on_change(self, command: inbox.Change) -> None:
        if command.spec.log_level != self.spec.log_level and self._process is not None:
            self._try_send(SetLogLevel(command.spec.log_level))
        self.spec, self.is_preload = command.spec, command.is_preload
        self._load_timeout_s = command.load_timeout_s
        if not command.is_reload:
            return
        match self.state:
            case State.READY | State.STARTING | State.LOADING:
                self._renew()
            case State.BACKOFF | State.FAILED | State.INCOMPATIBLE:
                # What was wrong may be what was changed.
                self._restart.forgive()
                self._enter(State.STOPPED)
                self._start_on_demand()
            case State.STOPPED | State.STOPPING | State.DRAINING:
                pass

    def _renew(self) -> None:
        """End this incarnation; what it does goes on at the next one."""
        self._is_wanted = True
        if self.state is State.READY:
            self._parked.park(self._wire.detach(self.epoch), self._effects.now())
        self._terminate()

    def _on_adopt(self, process: Process, epoch: int) -> None:
        self.epoch = epoch
        self._process = process
        self._connection = self._wire.attach(self)
        self._enter(State.STARTING)
        self._timers.arm(self._limits.adopt_s)
        self._timers.watch(epoch, process)
        self._timers.greet(self._try_welcome)

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
            if process.is_adopted:
                # Of the version before an upgrade: its model is loaded by one of ours.
                log.info("replacing worker %s#%d: it speaks protocol %s, not %s", self.name, self.epoch, theirs, ours)
                self._is_wanted = True
                self._terminate()
                return
            why = f"the worker of '{self.name}' speaks protocol {theirs} and the gateway {ours}; reinstall mlxd"
            self._terminate(Failure(Code.INCOMPATIBLE, why))
        elif self.state is State.STARTING:
            self._enter(State.LOADING)
            self._timers.arm(self._load_timeout_s)
            self._timers.greet(self._try_welcome)

    def _on_ready(self, ready: Ready, process: Process) -> None:
        if self.state not in (State.STARTING, State.LOADING):
            return
        if not process.is_adopted:
            self._events.load_seconds(self.name, ready.load_s)
        elif self.ready is None:
            # What it still does is for clients that went away with their gateway.
            self._try_send(Drain(0.0))
            self._timers.arm(self._limits.adopt_s)
        self.ready = ready
        self._events.lane(self.name, ready.lane)
        if ready.lane_reason:
            log.warning("%s: %s", self.name, ready.lane_reason)
        if not process.is_adopted:
            self._begin()

    @property
    def _is_taking_over(self) -> bool:
        """An adopted worker has still to answer, or to end what it did for others."""
        is_adopted = self._process is not None and self._process.is_adopted
        return is_adopted and (self.state is State.STARTING or (self.state is State.LOADING and self.ready is not None))

    def _on_pong(self, pong: Pong) -> None:
        self._heartbeat.answered(self._effects.now())
        age_s = pong.stats.step_age_ms / 1000
        if self.state in (State.READY, State.DRAINING) and pong.stats.running > 0 and age_s > self._limits.step_s:
            self._abort(f"its newest step is {age_s:.0f} s old")

    def _on_beat(self) -> None:
        now = self._effects.now()
        silence_s = self._heartbeat.beat(now)
        self._parked.tend(now)
        if self.state is State.READY and self._parked.has_stranded(now):
            # It has lost touch with us for a while and ended what it had.
            self._parked.requeue()
        self._serve()
        if self.state is State.STARTING and self._process is None and not self._is_asked_for:
            # Nobody waits any more for the room that others would have to make.
            self._terminate()
        if self._process is None or self.state is State.STOPPING:
            return
        self._wire.ping(self, time.monotonic_ns())
        if self.state in (State.READY, State.DRAINING) and silence_s > self._limits.pong_s:
            self._abort(f"no answer to pings for {silence_s:.0f} s")

    # -- transitions -------------------------------------------------------------------------------------------------

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
