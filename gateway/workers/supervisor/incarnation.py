"""Incarnation of a worker: one process from the wait for memory to its exit, and all state that dies with it."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from msgspec.structs import replace

from gateway.link.link import WorkerLink
from gateway.link.sequence import Sequence
from gateway.link.transport import WorkerGone
from gateway.link.worker_connection import Connection
from gateway.workers.supervisor import inbox
from gateway.workers.supervisor.exits import LastFacts, Verdict, judge
from gateway.workers.supervisor.ports import Effects, WorkerPort
from gateway.workers.supervisor.ranks import RankGroup
from gateway.workers.supervisor.state import Events, ModelUnavailable, WorkerLimits
from protocol.failures import Code, Failure
from protocol.from_worker import AdaptersSet, Goodbye, Hello, Loading, Ready
from protocol.minors import MAJOR, MINOR, SET_ADAPTERS_MINOR, unknown_field, unknown_part
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import (
    Detokenize,
    Down,
    Drain,
    Dump,
    Generate,
    SetAdapters,
    SetLogLevel,
    Shutdown,
    Tokenize,
    Welcome,
)

log = logging.getLogger(__name__)

GREET_RETRY_S: Final = 0.05


class Incarnation:
    """One process of a worker, known by its epoch. Owned by the worker's state machine, which alone decides.

    What others set takes effect at once, because the next request must see it: that a send failed (`is_unreachable`,
    the link), that new requests wait (`is_gated`) or are refused (`overload`, both the memory broker).
    """

    def __init__(
        self,
        name: str,
        link: WorkerLink,
        park: Callable[[Sequence], None],
        effects: Effects,
        events: Events,
        limits: WorkerLimits,
        post: Callable[[inbox.InboxMessage], None],
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        epoch: int,
    ) -> None:
        self.name = name
        self.epoch = epoch
        self.process: WorkerPort | None = None
        self.loading: Loading | None = None
        self.ready: Ready | None = None
        self.ready_at = 0.0
        self.goodbye: Goodbye | None = None
        self.hello: Hello | None = None
        # A request was refused for a field that came after its minor version of the protocol.
        self.is_outgrown = False
        # The fault for which the gateway ends it; None while it runs, and when it was asked to end.
        self.fault: Failure | None = None
        # A successor was ordered: by a restart, a change or a recycling.
        self.has_successor = False
        # Ended to make room: its sequences go on when there is room again.
        self.is_evicted = False
        self.is_gated = False
        # The reason to refuse new requests although it is ready: there is no memory for more.
        self.overload: Failure | None = None
        # The worker is routable: the Welcome was sent to it. An adopted one has ended what it did for others.
        self.is_greeted = False
        self.has_drained = False
        # The wait for memory.
        self.admission: asyncio.Task[None] | None = None
        self._link = link
        self._park = park
        self._effects = effects
        self._events = events
        self._limits = limits
        self._post = post
        self._start_task = start_task
        self._connection: Connection | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._escalation: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"{self.name}#{self.epoch}"

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes on this machine: several of a group."""
        if isinstance(self.process, RankGroup):
            return self.process.pids
        return (self.process.pid,) if self.process is not None else ()

    @property
    def is_adopted(self) -> bool:
        return self.process is not None and self.process.is_adopted

    @property
    def minor(self) -> int:
        """The minor version of the protocol that it speaks."""
        return MINOR if self.hello is None else self.hello.proto_minor

    @property
    def is_unreachable(self) -> bool:
        """A request could not be sent to it."""
        return self._connection is not None and self._connection.is_unreachable

    @property
    def stats(self) -> Stats | None:
        """The newest numbers that it has sent, also after its end."""
        return self._connection.stats if self._connection is not None else None

    @property
    def is_loaded(self) -> bool:
        """Whether it can serve: its model is loaded and requests can be sent. A Ready may overtake the connection for
        them; an adopted worker ends first what it did for its earlier gateway's clients."""
        return self.ready is not None and (self.has_drained if self.is_adopted else self.is_greeted)

    @property
    def healthy_s(self) -> float | None:
        """How long it has been ready; None if it never was."""
        return None if self.ready is None else self._effects.now() - self.ready_at

    @property
    def is_useful(self) -> bool:
        """Whether it has generated something."""
        return self.stats is not None and self.stats.generation_tokens > 0

    # -- start ---------------------------------------------------------------------------------------------------------

    async def wait_for_memory(self, spec: WorkerSpec) -> None:
        """Report `Admitted` to the inbox when there is room, or `Denied`."""
        try:
            share_bytes = await self._effects.admit(spec)
        except ModelUnavailable as error:
            self._post(inbox.MemoryDenied(spec.epoch, error.failure))
        except Exception:  # The root of a task, in a group with all that the daemon does.
            log.exception("worker %s: internal error in its wait for memory", spec.name)
            why = f"model '{spec.name}' is not available: internal error"
            self._post(inbox.MemoryDenied(spec.epoch, Failure(Code.INTERNAL, why)))
        else:
            self._post(inbox.MemoryGranted(spec.epoch, share_bytes))

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
        """Take over a process that an earlier gateway started."""
        self._connection = self._link.attach(self.name, self.epoch, self._post, self._park)
        self._watch(process)

    def greet(self) -> None:
        """Send the Welcome, once, as soon as the worker is routable."""
        if self._greeting is None:
            self._greeting = self._start_task(self._greet())

    def _watch(self, process: WorkerPort) -> None:
        self.process = process
        self._start_task(self._report_exit(process))

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, message: Down) -> bool:
        """Whether the worker could be reached."""
        if self._connection is None:
            return False
        try:
            self._link.send(self._connection, message)
        except WorkerGone:
            return False
        return True

    def ping(self) -> None:
        if self._connection is not None:
            self._link.ping(self._connection, time.monotonic_ns())

    def is_sender_of(self, hello: Hello) -> bool:
        """Whether the process that was started here introduces itself, and no second one of its name."""
        if hello.pid == self.pid:
            return True
        self._events.stale_message()
        log.warning("refused a second worker %s: pid %d, not %d", self, hello.pid, self.pid)
        return False

    def foreign(self, hello: Hello) -> Failure | None:
        """The fault of a worker of another protocol. An adopted one has none: it is of the version before an upgrade,
        and its model is loaded by one of ours."""
        theirs, ours = f"{hello.proto_major}.{hello.proto_minor}", f"{MAJOR}.{MINOR}"
        if self.is_adopted:
            log.info("replacing worker %s: it speaks protocol %s, not %s", self, theirs, ours)
            self.has_successor = True
            return None
        why = f"the worker of '{self.name}' speaks protocol {theirs} and the gateway {ours}; reinstall mlxd"
        return Failure(Code.INCOMPATIBLE, why)

    def overdue(self, load_timeout_s: float) -> Failure | None:
        """The fault of a worker that was not loaded in time. An adopted one that does not answer has none."""
        if self.is_adopted and (self.hello is None or self.ready is not None):
            log.warning("worker %s does not answer its new gateway and is replaced", self)
            return None
        self.send(Dump(0))
        return Failure(Code.LOAD_TIMEOUT, f"model '{self.name}' was not loaded within {load_timeout_s:.0f} s")

    def note_ready(self, ready: Ready, adapters: tuple[tuple[str, str], ...]) -> None:
        """Keep what was loaded. `adapters` are those that it is to have."""
        if self.ready is None and self.is_adopted:
            # What it still does is for clients that left with their gateway.
            self.send(Drain(0.0))
        elif self.ready is None:
            self._events.load_seconds(self.name, ready.load_s)
        self.ready = ready
        if {(info.name, info.path) for info in ready.adapters} != set(adapters):
            # They have changed while it loaded, or before this gateway was started.
            self.set_adapters(adapters)
        self._events.batch_mode(self.name, ready.batch_mode)
        if ready.batch_mode_reason:
            log.warning("%s: %s", self.name, ready.batch_mode_reason)

    def begin_serving(self, log_level: str) -> None:
        self.loading = None
        self.ready_at = self._effects.now()
        if self.is_adopted:
            # It was started under another configuration.
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
        """Let a running worker have what can be changed in it; one that is too old for adapters is replaced once a
        request names one."""
        if spec.log_level != before.log_level:
            self.send(SetLogLevel(spec.log_level))
        if spec.adapters != before.adapters:
            self.set_adapters(spec.adapters)

    def set_adapters(self, adapters: tuple[tuple[str, str], ...]) -> None:
        """Let a worker have these and no others."""
        if self.ready is not None and self.minor >= SET_ADAPTERS_MINOR:
            self.send(SetAdapters(0, adapters))

    def detach(self) -> None:
        """Drop what it says from now on, and park its unfinished sequences."""
        self._link.detach(self.epoch)

    def refusal(self, request: Generate) -> Failure | None:
        """Reason why a worker of an earlier version must not get this request: it would ignore a part of it."""
        return self._outgrown(unknown_field(request, self.minor) if self.minor < MINOR else None)

    def question_refusal(self, question: Tokenize | Detokenize) -> Failure | None:
        """Likewise for a question about tokens."""
        if self.minor >= MINOR or isinstance(question, Detokenize):
            return None
        return self._outgrown(unknown_part(question.prompt, self.minor))

    def _outgrown(self, field: str | None) -> Failure | None:
        if field is None:
            return None
        self.is_outgrown = True
        message = (
            f"the worker of model '{self.name}' was started by an earlier version of mlxd, which does not know "
            f"{field}; it is replaced once it is idle: try again later, or restart the model"
        )
        return Failure(Code.INCOMPATIBLE, message)

    # -- end -----------------------------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """End the process gently: Shutdown, then SIGTERM, then SIGKILL after a time that grows with the weights."""
        assert self.process is not None
        term_s = self._limits.term_s if self.send(Shutdown()) else 0.0
        kill_s = self._limits.stop_grace_s(self.ready.weights_bytes if self.ready is not None else 0)
        self._escalate(self.process, ((term_s, signal.SIGTERM), (max(0.0, kill_s - term_s), signal.SIGKILL)))

    def abort(self) -> None:
        """End a stuck process: its stacks into the log, then SIGABRT, then SIGKILL."""
        assert self.process is not None
        self.send(Dump(0))
        limits = self._limits
        self._escalate(self.process, ((limits.dump_s, signal.SIGABRT), (limits.abort_s, signal.SIGKILL)))

    def close(self, status: int | None, *, is_asked: bool) -> Verdict:
        """Release the process, which has exited. Its unfinished sequences are parked."""
        assert self.process is not None
        lines, known = self.process.last_lines(), self.process.failure()
        self.process.close()
        self.process = None
        _cancel(self._escalation)
        _cancel(self._greeting)
        self.detach()
        is_replaced = self.has_successor or self.is_evicted
        was_ready = self.ready is not None
        facts = LastFacts(str(self), self.name, self.goodbye, self.fault, known, is_asked, is_replaced, was_ready)
        return judge(status, lines, facts)

    # -- tasks that wait, so that the state machine never has to -------------------------------------------------------

    async def _report_exit(self, process: WorkerPort) -> None:
        status = await process.wait()
        if status is None or status > 0:
            # A worker that exits by itself may have its Goodbye and its last deltas still in the socket.
            await self._effects.sleep(self._limits.goodbye_s)
        self._post(inbox.ProcessExited(self.epoch, status))

    async def _greet(self) -> None:
        welcome = Welcome(MINOR, self._link.boot, self._limits.heartbeat_s)
        give_up_at = self._effects.now() + self._limits.greet_s
        while not (is_sent := self.send(welcome)) and self._effects.now() < give_up_at:
            await self._effects.sleep(GREET_RETRY_S)
        if is_sent:
            self.is_greeted = True
            self._post(inbox.WorkerEvent(inbox.EventKind.GREETED, self.epoch))

    def _escalate(self, process: WorkerPort, steps: tuple[tuple[float, int], ...]) -> None:
        """Send each signal after its delay, unless the process has exited by then."""
        _cancel(self._escalation)
        self._escalation = self._start_task(self._signal_in_turn(process, steps))

    async def _signal_in_turn(self, process: WorkerPort, steps: tuple[tuple[float, int], ...]) -> None:
        for delay_s, signum in steps:
            await self._effects.sleep(delay_s)
            process.signal(signum)


def _cancel(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
