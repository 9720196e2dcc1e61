"""Process of a worker, from the wait for memory to the exit, with all state that ends with it."""

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from typing import Any, Final

from msgspec.structs import replace

from gateway.link.sequence import Sequence
from gateway.link.transport import Connection, WorkerGone
from gateway.workers.supervisor import inbox
from gateway.workers.supervisor.exits_and_restarts import Verdict, WorkerExit
from gateway.workers.supervisor.ranks import RankGroup
from gateway.workers.supervisor.state import Effects, ModelUnavailable, WorkerPort
from protocol import PROTOCOL
from protocol.failures import Code, Failure
from protocol.from_worker import AdaptersSet, Goodbye, Hello, Loading, Ready
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import (
    Down,
    Drain,
    Dump,
    SetAdapters,
    SetLogLevel,
    Shutdown,
    Welcome,
)

log = logging.getLogger(__name__)

GREET_RETRY_S: Final = 0.05


class WorkerProcess:
    """One process of a worker, identified by its epoch. Owned by the worker's state machine.

    Three fields have other writers, because the next request must see their changes: the link sets `is_unreachable`,
    the memory broker `is_gated` (new requests wait) and `overload` (new requests are refused).
    """

    def __init__(
        self,
        name: str,
        epoch: int,
        effects: Effects,
        post: Callable[[inbox.InboxMessage], None],
        park: Callable[[Sequence], None],
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.port: WorkerPort | None = None
        self.loading: Loading | None = None
        self.ready: Ready | None = None
        self.ready_at = 0.0
        self.goodbye: Goodbye | None = None
        self.hello: Hello | None = None
        # Reason why the gateway ended the worker, if the worker was at fault.
        self.fault: Failure | None = None
        # Whether a restart, a changed specification or a recycling has ordered the replacement of this process.
        self.has_successor = False
        # Whether the process was ended to make room. Its sequences are resumed when there is room again.
        self.is_evicted = False
        self.is_gated = False
        # Failure with which new requests are refused while memory is short.
        self.overload: Failure | None = None
        # Whether the Welcome was sent. It can be sent only if the worker is routable.
        self.is_greeted = False
        # Whether an adopted worker has ended the sequences of the earlier gateway.
        self.has_drained = False
        # Task of `wait_for_memory`.
        self.admission: asyncio.Task[None] | None = None
        self._effects = effects
        self._link, self._events, self._limits = effects.link, effects.events, effects.limits
        self._post = post
        self._park = park
        self._start_task = start_task
        self._connection: Connection | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._escalation: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"{self.name}#{self.epoch}"

    @property
    def pid(self) -> int:
        return self.port.pid if self.port is not None else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Pids of the worker's processes on this machine; for a group, of all its local ranks."""
        if isinstance(self.port, RankGroup):
            return self.port.pids
        return (self.port.pid,) if self.port is not None else ()

    @property
    def is_adopted(self) -> bool:
        return self.port is not None and self.port.is_adopted

    @property
    def is_unreachable(self) -> bool:
        """Whether sending a request to the worker has failed."""
        return self._connection is not None and self._connection.is_unreachable

    @property
    def stats(self) -> Stats | None:
        """The worker's newest statistics, also after its exit."""
        return self._connection.stats if self._connection is not None else None

    @property
    def is_loaded(self) -> bool:
        """Whether the model is loaded, and the worker is routable (a new one) or has drained (an adopted one)."""
        return self.ready is not None and (self.has_drained if self.is_adopted else self.is_greeted)

    @property
    def healthy_s(self) -> float | None:
        """Seconds since the worker became ready; None if it was never ready."""
        return None if self.ready is None else self._effects.now() - self.ready_at

    @property
    def is_useful(self) -> bool:
        """Whether the worker has generated a token."""
        return self.stats is not None and self.stats.generation_tokens > 0

    # -- start ---------------------------------------------------------------------------------------------------------

    async def wait_for_memory(self, spec: WorkerSpec) -> None:
        """Wait for a memory grant, and post `MemoryGranted` or `MemoryDenied`."""
        try:
            memory_bytes = await self._effects.admit(spec)
        except ModelUnavailable as error:
            self._post(inbox.MemoryDenied(spec.epoch, error.failure))
        except Exception:  # An exception that leaves this task would end the daemon's task group.
            log.exception("worker %s: internal error in its wait for memory", spec.name)
            why = f"model '{spec.name}' is not available: internal error"
            self._post(inbox.MemoryDenied(spec.epoch, Failure(Code.INTERNAL, why)))
        else:
            self._post(inbox.MemoryGranted(spec.epoch, memory_bytes))

    def cancel_memory(self) -> None:
        _cancel(self.admission)

    def spawn(self, spec: WorkerSpec) -> None:
        """Start the process. Raises `OSError`."""
        self._connection = self._link.attach(self.name, self.epoch, self._post, self._park)
        try:
            process = self._effects.spawn(spec)
        except OSError:
            self.detach()
            raise
        self._watch(process)

    def adopt(self, process: WorkerPort) -> None:
        """Adopt a process that an earlier gateway started."""
        self._connection = self._link.attach(self.name, self.epoch, self._post, self._park)
        self._watch(process)

    def greet(self) -> None:
        """Start to send the Welcome, which is retried until the worker is routable."""
        if self._greeting is None:
            self._greeting = self._start_task(self._greet())

    def _watch(self, process: WorkerPort) -> None:
        self.port = process
        self._start_task(self._report_exit(process))

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, message: Down) -> bool:
        """Send a message, and return whether the worker could be reached."""
        if self._connection is None:
            return False
        try:
            self._link.send(self._connection, message)
        except WorkerGone:
            return False
        return True

    def ping(self) -> None:
        if self._connection is not None:
            self._link.ping(self._connection, int(self._effects.now() * 1e9))

    def is_sender_of(self, hello: Hello) -> bool:
        """Whether this worker's process has sent `hello`, and not another process of the same name."""
        if hello.pid == self.pid:
            return True
        self._events.stale_message()
        log.warning("refused a second worker %s: pid %d, not %d", self, hello.pid, self.pid)
        return False

    def protocol_fault(self, hello: Hello) -> Failure | None:
        """Return the failure of a worker that speaks another version of the protocol.

        Returns None for an adopted worker: a gateway before an upgrade started it, so it is replaced and not reported
        as failed.
        """
        if self.is_adopted:
            log.info("replacing worker %s: it speaks protocol %d, not %d", self, hello.protocol, PROTOCOL)
            self.has_successor = True
            return None
        why = f"the worker of '{self.name}' speaks protocol {hello.protocol} and the gateway {PROTOCOL}; reinstall mlxd"
        return Failure(Code.INCOMPATIBLE, why)

    def load_timeout_fault(self, load_timeout_s: float) -> Failure | None:
        """Return the failure of a worker that was not loaded in time.

        Returns None for an adopted worker that does not answer: it is replaced and not reported as failed.
        """
        if self.is_adopted and (self.hello is None or self.ready is not None):
            log.warning("worker %s does not answer its new gateway and is replaced", self)
            return None
        self.send(Dump(0))
        return Failure(Code.LOAD_TIMEOUT, f"model '{self.name}' was not loaded within {load_timeout_s:.0f} s")

    def note_ready(self, ready: Ready, adapters: tuple[tuple[str, str], ...]) -> None:
        """Record that the model is loaded, and correct its adapters if they differ from the configured `adapters`."""
        is_first = self.ready is None
        self.ready = ready
        if is_first and self.is_adopted:
            self._end_earlier_sequences()
        elif is_first:
            self._events.load_seconds(self.name, ready.load_s)
        if {(info.name, info.path) for info in ready.adapters} != set(adapters):
            self.set_adapters(adapters)
        self._events.batch_mode(self.name, ready.batch_mode)
        if ready.batch_mode_reason:
            log.warning("%s: %s", self.name, ready.batch_mode_reason)

    def note_greeted(self) -> None:
        """Record that the Welcome was sent. An adopted worker may have sent Ready before: it waited in its socket."""
        self.is_greeted = True
        if self.is_adopted and self.ready is not None:
            self._end_earlier_sequences()

    def _end_earlier_sequences(self) -> None:
        """Drain an adopted worker as soon as it is loaded and routable.

        The clients of its sequences were disconnected when the earlier gateway ended.
        """
        if self.is_greeted:
            self.send(Drain(0.0))

    def begin_serving(self, log_level: str) -> None:
        self.loading = None
        self.ready_at = self._effects.now()
        if self.is_adopted:
            # The worker may still have the log level of an older configuration.
            self.send(SetLogLevel(log_level))

    def note(self, message: Loading | AdaptersSet | Goodbye) -> None:
        match message:
            case Loading():
                self.loading = message
            case Goodbye():
                self.goodbye = message
            case AdaptersSet() if self.ready is not None:
                self.ready = replace(self.ready, adapters=message.adapters, weights_bytes=message.weights_bytes)
            case AdaptersSet():
                pass

    def change(self, before: WorkerSpec, spec: WorkerSpec) -> None:
        """Send the worker the changes from `before` to `spec` that need no restart."""
        if spec.log_level != before.log_level:
            self.send(SetLogLevel(spec.log_level))
        if spec.adapters != before.adapters:
            self.set_adapters(spec.adapters)

    def set_adapters(self, adapters: tuple[tuple[str, str], ...]) -> None:
        if self.ready is not None:
            self.send(SetAdapters(0, adapters))

    def detach(self) -> None:
        """Drop further messages of the worker, and park its unfinished sequences."""
        self._link.detach(self.epoch)

    # -- end -----------------------------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """End the process gently: Shutdown, SIGTERM, and SIGKILL after a time that grows with the weights."""
        assert self.port is not None
        term_s = self._limits.term_s if self.send(Shutdown()) else 0.0
        kill_s = self._limits.stop_grace_s(self.ready.weights_bytes if self.ready is not None else 0)
        self._escalate(self.port, ((term_s, signal.SIGTERM), (max(0.0, kill_s - term_s), signal.SIGKILL)))

    def abort(self) -> None:
        """End a stuck process: dump its stacks into the log, then SIGABRT, then SIGKILL."""
        assert self.port is not None
        self.send(Dump(0))
        limits = self._limits
        self._escalate(self.port, ((limits.dump_s, signal.SIGABRT), (limits.abort_s, signal.SIGKILL)))

    def close(self, status: int | None, *, is_asked: bool) -> Verdict:
        """Release the exited process, park its unfinished sequences, and return the consequences of the exit."""
        assert self.port is not None
        ended = WorkerExit(
            title=str(self),
            model=self.name,
            status=status,
            lines=self.port.last_lines(),
            goodbye=self.goodbye,
            fault=self.fault,
            known=self.port.failure(),
            is_asked=is_asked,
            is_replaced=self.has_successor or self.is_evicted,
            was_ready=self.ready is not None,
        )
        self.port.close()
        self.port = None
        _cancel(self._escalation)
        _cancel(self._greeting)
        self.detach()
        return ended.verdict()

    # -- waiting tasks, so that the state machine never waits ----------------------------------------------------------

    async def _report_exit(self, process: WorkerPort) -> None:
        status = await process.wait()
        if status is None or status > 0:
            # The Goodbye and the last deltas of the worker may still be in the socket.
            await self._effects.sleep(self._limits.goodbye_s)
        self._post(inbox.ProcessExited(self.epoch, status))

    async def _greet(self) -> None:
        welcome = Welcome(PROTOCOL, self._link.boot, self._limits.heartbeat_s)
        deadline = self._effects.now() + self._limits.greet_s
        while not (is_sent := self.send(welcome)) and self._effects.now() < deadline:
            await self._effects.sleep(GREET_RETRY_S)
        if is_sent:
            self._post(inbox.WorkerEvent(inbox.EventKind.GREETED, self.epoch))

    def _escalate(self, process: WorkerPort, steps: tuple[tuple[float, int], ...]) -> None:
        """Start a task that sends each signal after its delay, until the process exits."""
        _cancel(self._escalation)
        self._escalation = self._start_task(self._signal_in_turn(process, steps))

    async def _signal_in_turn(self, process: WorkerPort, steps: tuple[tuple[float, int], ...]) -> None:
        for delay_s, signum in steps:
            await self._effects.sleep(delay_s)
            process.signal(signum)


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
