"""Incarnation of a worker: one process from the wait for memory to its exit, and all state that dies with it."""

import asyncio
import logging
import signal
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from msgspec.structs import replace

from gateway.link.sequence import Runner, Sequence, WorkerConnection
from gateway.link.transport import WorkerGone
from gateway.workers.supervisor import inbox
from gateway.workers.supervisor.ports import Effects, WorkerPort, WorkerWire
from gateway.workers.supervisor.ranks import RankGroup
from gateway.workers.supervisor.state import ModelUnavailable, WorkerLimits
from protocol.failures import Code, Failure
from protocol.messages import (
    MINOR,
    AdaptersSet,
    Detokenize,
    Down,
    Dump,
    Generate,
    Goodbye,
    Loading,
    Ready,
    SetAdapters,
    Shutdown,
    Tokenize,
    Welcome,
)
from protocol.minors import ADAPTERS, unknown_field, unknown_part
from protocol.spec import WorkerSpec
from protocol.stats import Stats

log = logging.getLogger(__name__)

GREET_RETRY_S: Final = 0.05


class Incarnation:
    """One process of a worker, known by its epoch. Owned by the worker's state machine, which alone decides.

    Two facts are set by others and take effect at once, because the next request must see them: that a send failed
    (`is_suspect`, the link) and that new requests wait (`is_gated`, the memory broker).
    """

    def __init__(
        self,
        epoch: int,
        runner: Runner,
        wire: WorkerWire,
        effects: Effects,
        limits: WorkerLimits,
        post: Callable[[inbox.InboxMessage], None],
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self.epoch = epoch
        self.process: WorkerPort | None = None
        self.loading: Loading | None = None
        self.ready: Ready | None = None
        self.ready_at = 0.0
        self.goodbye: Goodbye | None = None
        # The minor version of the protocol that it speaks; and a request was refused for a field that came later.
        self.minor = MINOR
        self.is_outgrown = False
        # The fault for which the gateway ends it; None while it runs, and when it was asked to end.
        self.fault: Failure | None = None
        # A successor was ordered: by a restart, a change or a recycling.
        self.has_successor = False
        # Ended to make room: its sequences go on when there is room again.
        self.is_evicted = False
        self.is_suspect = False
        self.is_gated = False
        # The worker is routable: the Welcome was sent to it.
        self.is_greeted = False
        self._runner = runner
        self._wire = wire
        self._effects = effects
        self._limits = limits
        self._post = post
        self._start_task = start_task
        self._connection: WorkerConnection | None = None
        self._admission: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None
        self._escalation: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        return f"{self._runner.name}#{self.epoch}"

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
    def stats(self) -> Stats | None:
        """The newest numbers that it has sent, also after its end."""
        return self._connection.stats if self._connection is not None else None

    @property
    def is_useful(self) -> bool:
        """Whether it has generated something."""
        return self.stats is not None and self.stats.generation_tokens > 0

    # -- start ---------------------------------------------------------------------------------------------------------

    def request_memory(self, spec: WorkerSpec) -> None:
        """Report `Admitted` to the inbox when there is room, or `Denied`."""
        self._admission = self._start_task(self._admit(spec))

    def cancel_memory(self) -> None:
        _cancel(self._admission)

    def spawn(self, spec: WorkerSpec) -> None:
        """Start the process. Raises `OSError`."""
        self._connection = self._wire.attach(self._runner)
        try:
            process = self._effects.spawn(spec)
        except OSError:
            self.detach()
            raise
        self._watch(process)

    def adopt(self, process: WorkerPort) -> None:
        """Take over a process that an earlier gateway started."""
        self._connection = self._wire.attach(self._runner)
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
        try:
            self._wire.send(self._runner, message)
        except WorkerGone:
            return False
        return True

    def ping(self) -> None:
        self._wire.ping(self._runner, time.monotonic_ns())

    def set_adapters(self, adapters: tuple[tuple[str, str], ...]) -> None:
        """Let a worker have these and no others; one that is too old is replaced once a request names one."""
        if self.ready is not None and self.minor >= ADAPTERS:
            self.send(SetAdapters(0, adapters))

    def note_adapters(self, change: AdaptersSet) -> None:
        if self.ready is not None:
            self.ready = replace(self.ready, adapters=change.adapters, weights_bytes=change.weights_bytes)

    def detach(self) -> list[Sequence]:
        """Drop what it says from now on. Returns its unfinished sequences."""
        return self._wire.detach(self.epoch)

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
            f"the worker of model '{self._runner.name}' was started by an earlier version of mlxd, which does not know "
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

    def close(self, process: WorkerPort) -> list[str]:
        """Release the process, which has exited. Returns the end of its output."""
        lines = process.last_lines()
        process.close()
        self.process = None
        _cancel(self._escalation)
        _cancel(self._greeting)
        return lines

    # -- tasks that wait, so that the state machine never has to -------------------------------------------------------

    async def _admit(self, spec: WorkerSpec) -> None:
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

    async def _report_exit(self, process: WorkerPort) -> None:
        status = await process.wait()
        if status is None or status > 0:
            # A worker that exits by itself may have its Goodbye and its last deltas still in the socket.
            await self._effects.sleep(self._limits.goodbye_s)
        self._post(inbox.ProcessExited(self.epoch, status))

    async def _greet(self) -> None:
        welcome = Welcome(MINOR, self._wire.boot, self._limits.heartbeat_s)
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
