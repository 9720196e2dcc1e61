"""Incarnation of a worker: one process from the wait for memory to its exit, and all state that dies with it."""

import signal
import time

from msgspec.structs import replace

from gateway.link.sequence import Connection, Runner, Sequence
from gateway.link.transport import WorkerGone
from gateway.supervisor.ports import Effects, Process, Wire
from gateway.supervisor.ranks import Group
from gateway.supervisor.state import Limits
from gateway.supervisor.timers import Watchers
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


class Incarnation:
    """One process of a worker, known by its epoch. Owned by the worker's state machine, which alone decides.

    Two facts are set by others and take effect at once, because the next request must see them: that a send failed
    (`is_suspect`, the link) and that new requests wait (`is_gated`, the memory broker).
    """

    def __init__(self, epoch: int, runner: Runner, wire: Wire, limits: Limits, watchers: Watchers) -> None:
        self.epoch = epoch
        self.process: Process | None = None
        self.loading: Loading | None = None
        self.ready: Ready | None = None
        self.ready_at = 0.0
        self.goodbye: Goodbye | None = None
        # The minor version of the protocol that it speaks; and a request was refused for a field that came later.
        self.minor = MINOR
        self.is_outgrown = False
        # The fault for which the gateway ends it; None while it runs, and when it was asked to end.
        self.blame: Failure | None = None
        # A successor was ordered: by a restart, a change or a recycling.
        self.has_successor = False
        # Ended to make room: its sequences go on when there is room again.
        self.is_evicted = False
        self.is_suspect = False
        self.is_gated = False
        self._runner = runner
        self._wire = wire
        self._limits = limits
        self._watchers = watchers
        self._connection: Connection | None = None

    def __str__(self) -> str:
        return f"{self._runner.name}#{self.epoch}"

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes on this machine: several of a group."""
        if isinstance(self.process, Group):
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

    # -- start -------------------------------------------------------------------------------------------------------

    def request_memory(self, spec: WorkerSpec) -> None:
        """Report `Admitted` to the inbox when there is room, or `Denied`."""
        self._watchers.admit(spec)

    def cancel_memory(self) -> None:
        self._watchers.cancel_admission()

    def spawn(self, effects: Effects, spec: WorkerSpec) -> None:
        """Start the process. Raises `OSError`."""
        self._connection = self._wire.attach(self._runner)
        try:
            process = effects.spawn(spec)
        except OSError:
            self.detach()
            raise
        self._watch(process)

    def adopt(self, process: Process) -> None:
        """Take over a process that an earlier gateway started."""
        self._connection = self._wire.attach(self._runner)
        self._watch(process)

    def greet(self) -> None:
        """Send the Welcome, once, as soon as the worker is routable."""
        self._watchers.greet(lambda: self.send(Welcome(MINOR, self._wire.boot, self._limits.heartbeat_s)))

    def _watch(self, process: Process) -> None:
        self.process = process
        self._watchers.watch(self.epoch, process)

    # -- messages ----------------------------------------------------------------------------------------------------

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

    # -- end ---------------------------------------------------------------------------------------------------------

    def shut_down(self) -> None:
        """End the process gently: Shutdown, then SIGTERM, then SIGKILL after a time that grows with the weights."""
        assert self.process is not None
        term_s = self._limits.term_s if self.send(Shutdown()) else 0.0
        kill_s = self._limits.stop_grace_s(self.ready.weights_bytes if self.ready is not None else 0)
        self._watchers.escalate(self.process, ((term_s, signal.SIGTERM), (max(0.0, kill_s - term_s), signal.SIGKILL)))

    def abort(self) -> None:
        """End a stuck process: its stacks into the log, then SIGABRT, then SIGKILL."""
        assert self.process is not None
        self.send(Dump(0))
        limits = self._limits
        self._watchers.escalate(self.process, ((limits.dump_s, signal.SIGABRT), (limits.abort_s, signal.SIGKILL)))

    def close(self, process: Process) -> list[str]:
        """Release the process, which has exited. Returns the end of its output."""
        lines = process.last_lines()
        process.close()
        self.process = None
        self._watchers.finish()
        return lines
