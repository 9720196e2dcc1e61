"""State machine of one model's worker: its states, transitions and timers, from the first start to the last exit.

    STOPPED → STARTING → LOADING → READY → DRAINING → STOPPING → STOPPED, or BACKOFF, FAILED, INCOMPATIBLE after a crash

`run` is the single writer: it handles one inbox message after another and waits for nothing else. Callers wait on
futures. Tasks wait for memory, exits and delays, and report to the inbox. The state of one process is in
`worker_process.py`, the rules for its exit in `exits_and_restarts.py`; sequences without a process are parked in the
link.

Handle of a worker: the state and the commands that the pool, the memory broker and requests use.
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, assert_never

from msgspec.structs import replace

from gateway.link.parked_sequences import ParkedSequences
from gateway.link.transport import SendFailed, SequenceProgressed
from gateway.workers.supervisor import inbox
from gateway.workers.supervisor.exits_and_restarts import RestartPolicy
from gateway.workers.supervisor.inbox import CommandKind, EventKind, Waiter, Waiters, WorkerInbox
from gateway.workers.supervisor.state import SHUTTING_DOWN, Effects, ModelUnavailable, State, WorkerPort, WorkerView
from gateway.workers.supervisor.worker_process import WorkerProcess
from protocol import PROTOCOL
from protocol.failures import Code, Failure
from protocol.from_worker import AdaptersSet, Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.run_clock import RunClock
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import Drain, Generate

log = logging.getLogger(__name__)


class WorkerHandle:
    """State of one model's worker, and commands to it. Only `Worker` changes the state; commands go through its inbox.

    Three changes bypass the inbox, because the next request must see them: the gate and the overload, which the memory
    broker sets, and a failed send.
    """

    process: WorkerProcess

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
        is_held = self.process.is_unreachable or self.process.is_gated or self.parked.is_isolating
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
        return self.process.epoch

    @property
    def ready(self) -> Ready | None:
        return self.process.ready

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stats(self) -> Stats | None:
        return self.process.stats

    @property
    def retry_after_s(self) -> float:
        is_waiting = self.state in (State.BACKOFF, State.FAILED)
        return self.restart_policy.wait_s(self._effects.now()) if is_waiting else 0.0

    def view(self) -> WorkerView:
        process = self.process
        loading = process.loading
        return WorkerView(
            name=self.name,
            path=self.spec.path,
            state=self.state,
            epoch=process.epoch,
            pid=process.pid,
            is_adopted=process.is_adopted,
            is_preload=self.is_preload and not self.was_evicted,
            ready=process.ready,
            stats=process.stats,
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
        if (overload := self.process.overload) is not None:
            self._events.memory_refused(self.name)
            return overload
        return self.parked.quarantine.refusal(request, self._effects.now())

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

    def change(self, spec: WorkerSpec, *, is_preload: bool, is_reload: bool) -> None:
        """Set a new specification. With `is_reload`, a running worker is replaced, which pauses its streams."""
        self._inbox.put(inbox.ChangeSpec(spec, is_preload, is_reload))

    def adopt(self, process: WorkerPort, epoch: int) -> None:
        """Adopt a process that an earlier gateway started. No other command may precede this one."""
        self._inbox.put(inbox.AdoptProcess(process, epoch))

    def kill(self) -> None:
        """Send the process SIGKILL at once."""
        if (port := self.process.port) is not None:
            port.signal(signal.SIGKILL)

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
        self.process.is_gated = True

    def open_gate(self) -> None:
        if self.process.is_gated:
            self.process.is_gated = False
            self._inbox.put(inbox.WorkerEvent(EventKind.REOPEN, self.epoch))

    # -- waiting callers and sequences ---------------------------------------------------------------------------------

    @property
    def _is_wanted(self) -> bool:
        return self._has_demand or self.is_preload

    @property
    def _has_demand(self) -> bool:
        return self.process.has_successor or self._waiters.has_any() or self.parked.has_any

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


class Worker(WorkerHandle):
    """Worker of one model over all its processes. All waiting callers are answered when it has no process."""

    def __init__(
        self,
        spec: WorkerSpec,
        effects: Effects,
        *,
        is_preload: bool = False,
    ) -> None:
        super().__init__(spec, effects, is_preload=is_preload)
        self._limits = effects.limits
        self._load_timeout_s = self._limits.load_s
        # Heartbeat time-outs count only the time in which this gateway runs. A delayed turn of the event loop counts
        # for at most two intervals.
        self._run_clock = RunClock(2 * self._limits.heartbeat_s, effects.now)
        self._answered_at = 0.0
        self._tasks: asyncio.TaskGroup | None = None
        self._alarm: asyncio.Task[None] | None = None
        self._alarm_token = 0
        self._is_closing = False
        # Epoch 0: no process has been started yet.
        self.process = self._new_process(0)

    # -- the single writer ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Own the state until cancelled."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._start_task(self._beat())
                while True:
                    message = await self._inbox.get()
                    try:
                        self._handle(message)
                    except Exception:  # The state machine must go on after a failed transition.
                        log.exception("worker %s: internal error in state %s", self.name, self.state)
                        why = f"model '{self.name}' is not available: internal error"
                        self._fail_waiting(Failure(Code.INTERNAL, why))
                        self._stoppers.wake()
        finally:
            self._inbox.close()
            self._fail_waiting(SHUTTING_DOWN)
            self._stoppers.wake()

    def _handle(self, message: inbox.InboxMessage) -> None:
        process = self.process
        # Messages about an earlier process are stale.
        if isinstance(message, inbox.EpochMessage) and message.epoch != process.epoch:
            return
        match message:
            case inbox.WorkerCommand(kind, waiter):
                self._on_command(kind, waiter)
            case inbox.StopWorker():
                self._on_stop(message)
            case inbox.ChangeSpec():
                self._on_change(message)
            case inbox.AdoptProcess():
                self._on_adopt(message)
            case inbox.MemoryGranted(_, memory_bytes):
                self._on_granted(memory_bytes)
            case inbox.MemoryDenied(_, failure):
                self._on_denied(failure)
            case Hello():
                self._on_hello(message)
            case Loading():
                self._on_loading(message)
            case AdaptersSet() | Goodbye():
                process.note(message)
            case Ready():
                self._on_ready(message)
            case Drained():
                self._on_drained()
            case SequenceProgressed():
                self._serve()
            case inbox.WorkerEvent(kind):
                self._on_event(kind)
            case Pong():
                self._on_pong(message)
            case inbox.HeartbeatDue():
                self._on_heartbeat()
            case SendFailed():
                if self.state is State.READY:
                    self._set_alarm(self._limits.suspect_s)
            case inbox.AlarmDue(token):
                if token == self._alarm_token:
                    self._on_alarm()
            case inbox.ProcessExited(_, status):
                self._on_exited(status)
            case _:
                assert_never(message)

    # -- commands of callers -------------------------------------------------------------------------------------------

    def _on_command(self, kind: CommandKind, waiter: Waiter) -> None:
        self._waiters.add(waiter)
        if self._is_closing:
            self._answer_waiters(SHUTTING_DOWN)
            return
        if kind is not CommandKind.READY:
            self.restart_policy.reset()
        if kind is CommandKind.RESTART:
            # The restart goes on even if the operator disconnects.
            self.process.has_successor = True
            if self.is_resident:
                self._replace()
        match self.state:
            case State.READY:
                if self.is_ready:
                    self._answer_waiters(None)
            case State.STOPPED:
                self._start()
            case State.FAILED | State.INCOMPATIBLE:
                if self.restart_policy.may_start(self._effects.now(), self._effects.stamp(self.spec)):
                    self._start()
                else:
                    self._answer_waiters(self.restart_policy.reason)
            case State.BACKOFF:
                if kind is not CommandKind.READY:
                    self._start()
            case State.STARTING | State.LOADING | State.DRAINING | State.STOPPING:
                pass

    def _on_stop(self, command: inbox.StopWorker) -> None:
        self._stoppers.add(command.waiter)
        self._is_closing |= command.is_closing
        self.process.has_successor = False
        unloaded = command.reason or Failure(Code.DRAINING, f"model '{self.name}' was unloaded")
        self._fail_waiting(SHUTTING_DOWN if self._is_closing else unloaded)
        match self.state:
            case State.READY:
                self._enter(State.DRAINING)
                # The alarm ends a worker that does not keep the drain's deadline.
                if command.drain_s > 0 and self.process.send(Drain(command.drain_s)):
                    self._set_alarm(command.drain_s + 1.0)
                else:
                    self._terminate()
            case State.DRAINING if command.drain_s > 0:
                self._set_alarm(command.drain_s)
            case State.STARTING | State.LOADING | State.DRAINING:
                self._terminate()
            case State.STOPPING:
                pass
            case State.STOPPED | State.BACKOFF | State.FAILED | State.INCOMPATIBLE:
                self.restart_policy.reset()
                self._enter_stopped()

    def _on_change(self, command: inbox.ChangeSpec) -> None:
        before, self.spec = self.spec, command.spec
        self.is_preload = command.is_preload
        if not command.is_reload:
            self.process.change(before, command.spec)
            return
        match self.state:
            case State.READY | State.STARTING | State.LOADING:
                self._replace()
            case State.BACKOFF | State.FAILED | State.INCOMPATIBLE:
                # The change may have removed the cause of the failures.
                self.restart_policy.reset()
                self._enter(State.STOPPED)
                self._start_on_demand()
            case State.STOPPED | State.STOPPING | State.DRAINING:
                pass

    def _on_event(self, event: EventKind) -> None:
        match event:
            case EventKind.EVICT if self.state is State.READY:
                self.process.is_evicted = self.was_evicted = True
                self._terminate()
            case EventKind.RECYCLE if self.state is State.READY:
                self._replace()
            case EventKind.GREETED:
                self.process.note_greeted()
                self._serve_when_loaded()
            case EventKind.REOPEN:
                self._serve()
            case EventKind.EVICT | EventKind.RECYCLE:
                pass

    # -- start ---------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Begin the next process, which first waits for memory."""
        self.restart_policy.note_start(self._effects.stamp(self.spec))
        process = self.process = self._new_process(self._effects.next_epoch())
        self._enter(State.STARTING)
        spec = replace(self.spec, epoch=self.epoch)
        process.admission = self._start_task(process.wait_for_memory(spec))

    def _new_process(self, epoch: int) -> WorkerProcess:
        return WorkerProcess(self.name, epoch, self._effects, self._inbox.put, self.parked.park, self._start_task)

    def _on_adopt(self, command: inbox.AdoptProcess) -> None:
        """Adopt a worker of an earlier gateway. It serves once it has sent Ready and Drained, else it is replaced."""
        self.process = self._new_process(command.epoch)
        self.process.adopt(command.process)
        self._enter(State.STARTING)
        self._set_alarm(self._limits.adopt_s)
        self.process.greet()

    def _on_granted(self, memory_bytes: int) -> None:
        """Spawn the process with the granted memory."""
        if self.state is not State.STARTING:
            return
        try:
            self.process.spawn(replace(self.spec, epoch=self.epoch, memory_bytes=memory_bytes))
        except OSError as error:
            self._enter_crashed(Failure(Code.INTERNAL, f"the worker of '{self.name}' cannot be started: {error}"))
            return
        self._allow_load()

    def _on_denied(self, failure: Failure) -> None:
        """Stop, because the model gets no memory. The next request tries again, because pins and budgets may have
        changed by then.
        """
        if self.state is State.STARTING:
            self.restart_policy.last_failure = failure
            self._fail_waiting(failure)
            self._enter_stopped()

    def _on_hello(self, hello: Hello) -> None:
        process = self.process
        if not process.is_sender_of(hello):
            return
        if hello.protocol != PROTOCOL:
            self._terminate(process.protocol_fault(hello))
        elif self.state is State.STARTING:
            process.hello = hello
            self._enter(State.LOADING)
            self._allow_load()
            process.greet()

    def _on_loading(self, loading: Loading) -> None:
        """Note the progress of a load. Once the size of the weights is known, the load has more time."""
        self.process.note(loading)
        if self.state is State.LOADING and self._limits.load_timeout_s(loading.total_bytes) > self._load_timeout_s:
            self._allow_load(loading.total_bytes)

    def _allow_load(self, weights_bytes: int = 0) -> None:
        """Give the load its time from now on."""
        self._load_timeout_s = self._limits.load_timeout_s(weights_bytes)
        self._set_alarm(self._load_timeout_s)

    def _on_ready(self, ready: Ready) -> None:
        if self.state in (State.STARTING, State.LOADING):
            if self.process.is_adopted and self.ready is None:
                self._set_alarm(self._limits.adopt_s)
            self.process.note_ready(ready, self.spec.adapters)
            self._serve_when_loaded()

    def _on_drained(self) -> None:
        if self.state is State.DRAINING:
            self._terminate()
        elif self.ready is not None:
            self.process.has_drained = True
            self._serve_when_loaded()

    def _serve_when_loaded(self) -> None:
        if self.state in (State.STARTING, State.LOADING) and self.process.is_loaded:
            self.process.begin_serving(self.spec.log_level)
            self._answered_at = self._run_clock.now
            self._enter(State.READY)
            self._serve()

    def _serve(self) -> None:
        """Resume parked sequences, then answer the callers that wait for the model."""
        if self.state is not State.READY or self.process.is_unreachable:
            return
        self.parked.resume(self.epoch)
        if self.is_ready:
            self._answer_waiters(None)

    # -- heartbeat and alarms ------------------------------------------------------------------------------------------

    def _on_pong(self, pong: Pong) -> None:
        self._answered_at = self._run_clock.now
        age_s = pong.stats.step_age_ms / 1000
        # An idle loop has no age. Sequences count as running only after their first step, which may hang too.
        is_late = age_s > self._limits.step_s
        if is_late and self.state in (State.READY, State.DRAINING):
            self._abort(f"its newest step is {age_s:.0f} s old")

    def _on_heartbeat(self) -> None:
        silence_s = self._run_clock.look() - self._answered_at
        self.parked.expire()
        self._serve()
        if self.state is State.STARTING and self.process.port is None and not self._is_wanted:
            # No request waits for this model any more, so other models must not be unloaded for it.
            self._terminate()
        if self.process.port is None or self.state is State.STOPPING:
            return
        self.process.ping()
        if self.state in (State.READY, State.DRAINING) and silence_s > self._limits.pong_s:
            self._abort(f"no answer to pings for {silence_s:.0f} s")

    def _on_alarm(self) -> None:
        match self.state:
            case State.STARTING | State.LOADING:
                self._terminate(self.process.load_timeout_fault(self._load_timeout_s))
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

    def _set_alarm(self, delay_s: float | None) -> None:
        """Set the alarm of this state, which replaces the previous one; None for no alarm."""
        self._alarm_token += 1
        if self._alarm is not None:
            self._alarm.cancel()
        alarm = inbox.AlarmDue(self._alarm_token)
        self._alarm = None if delay_s is None else self._start_task(self._put_after(delay_s, alarm))

    async def _beat(self) -> None:
        while True:
            await self._put_after(self._limits.heartbeat_s, inbox.HeartbeatDue())

    async def _put_after(self, delay_s: float, message: inbox.InboxMessage) -> None:
        await self._effects.sleep(delay_s)
        self._inbox.put(message)

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "run() comes first"
        return self._tasks.create_task(work)

    # -- end -----------------------------------------------------------------------------------------------------------

    def _terminate(self, fault: Failure | None = None) -> None:
        """End the process gently. With a `fault`, the exit counts as a crash, and waiting callers fail at once."""
        process = self.process
        process.fault = fault
        if fault is not None:
            self.restart_policy.last_failure = fault
            self._fail_waiting(fault)
        process.cancel_memory()
        if process.port is None:
            self._enter_stopped()
            return
        self._enter(State.STOPPING)
        process.shut_down()

    def _replace(self) -> None:
        """End this process; the next process resumes its sequences."""
        self.process.has_successor = True
        if self.state is State.READY:
            self.process.detach()
        self._terminate()

    def _abort(self, why: str) -> None:
        """End a stuck process and park its sequences."""
        process = self.process
        log.error("worker %s is stuck: %s", process, why)
        self._events.worker_stuck(self.name)
        process.fault = Failure(Code.WORKER_DIED, f"the worker of model '{self.name}' was stuck: {why}")
        self._enter(State.STOPPING)
        process.abort()
        process.detach()

    def _on_exited(self, status: int | None) -> None:
        """Apply the verdict on an exit. While a stop waits for a stuck worker, the worker's exit counts as ordered."""
        process = self.process
        is_asked = process.fault is None or self._stoppers.has_any()
        verdict = process.close(status, is_asked=is_asked and self.state in (State.DRAINING, State.STOPPING))
        self._events.worker_exit(self.name, verdict.status)
        verdict.apply_to(self.parked)
        if verdict.next is State.STOPPED:
            self._enter_stopped()
        elif verdict.next is State.BACKOFF:
            self._enter_crashed(verdict.failure)
        else:
            self._enter_final(verdict.next, verdict.failure)

    # -- states without a process, in which all waiters are answered --------------------------------------------------

    def _enter_stopped(self) -> None:
        """Enter the state `stopped`, or start again if callers or sequences wait."""
        self._enter(State.STOPPED)
        self._stoppers.wake()
        if self._is_closing:
            self._fail_waiting(SHUTTING_DOWN)
        elif self._has_demand:
            self._start()

    def _enter_final(self, state: State, failure: Failure) -> None:
        self.restart_policy.note_final(failure)
        self._enter(state)
        self._stoppers.wake()
        self._fail_waiting(failure)

    def _enter_crashed(self, failure: Failure) -> None:
        effects, process = self._effects, self.process
        delay_s, is_open = self.restart_policy.note_crash(
            failure, effects.now(), effects.random(), process.healthy_s, is_useful=process.is_useful
        )
        self._stoppers.wake()
        if delay_s > 0:
            self._enter(State.FAILED if is_open else State.BACKOFF)
            self._set_alarm(delay_s)
            # Callers wait for the next start, unless it is minutes away.
            if is_open or self._is_closing:
                self._fail_waiting(failure)
        else:
            self._enter(State.STOPPED)
            self._start_on_demand()

    def _start_on_demand(self) -> None:
        if not self._is_closing and self._is_wanted:
            self._start()

    def _enter(self, state: State) -> None:
        """Change the state, and cancel the alarm of the previous one."""
        if state is not self.state:
            log.info("worker %s: %s -> %s", self.process, self.state, state)
        self.state = state
        self.since = self._effects.now()
        self._set_alarm(None)
        self._events.state(self.name, state)
        self._effects.on_state(self.name, state)
