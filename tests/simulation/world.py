"""The simulated machine: its processes, its memory, and the frames between workers and the gateway."""

import asyncio
import math
import signal
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from gateway.link.transport import WorkerGone
from gateway.workers.supervisor.registry import ProcessIdentity, Registry, Survivor, WorkerRecord
from gateway.workers.supervisor.state import WorkerPort
from protocol.failures import Failure
from protocol.spec import WorkerSpec
from tests.simulation.simulated_worker import SimulatedWorker, Work
from tests.simulation.virtual_loop import VirtualLoop

GIB = 1 << 30
# After an impairment a gateway may find fault with a worker for this long.
SOUND_S = 20.0
NOT_ALIVE = (signal.SIGKILL, signal.SIGABRT)


class Violated(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of the faults of one seed; each is the probability of one occasion."""

    spawn_fails: float
    load_fails: float
    load_hangs: float
    dies: float
    hangs: float
    stops: float
    nonsense: float
    twice: float
    lies: float
    ignores_shutdown: float
    routes_late: float
    loses_welcome: float
    latency_s: float


class World:
    """Everything outside the gateway. It outlives a gateway, and traces what happens."""

    def __init__(self, loop: VirtualLoop, random: Random, rates: Rates) -> None:
        self.loop = loop
        self.random = random
        self.rates = rates
        self.is_calm = False
        # When the clock has jumped most recently.
        self.jumped_at = -math.inf
        self.processes: dict[int, Process] = {}
        self._alive: dict[int, Process] = {}
        # Memory of all running workers, without what some take beyond their shares.
        self.own_bytes = 0
        self.wire: SimulatedWire | None = None
        # Work for sequences by rid, and whether the gateway of a sequence, if there is one, knows it.
        self.work: dict[int, Work] = {}
        self.is_wanted: Callable[[int], bool] = lambda rid: True
        self.machine = Machine(self)
        self.faults: dict[str, int] = {}
        # Names of keys that were revoked: what they had stored is deleted.
        self.revoked: set[str] = set()
        self._next_pid = 1000
        self._digest = blake2b(digest_size=16)
        self.trace: list[str] = []

    def note(self, what: str) -> None:
        line = f"{self.loop.time():.6f} {what}"
        self._digest.update(line.encode() + b"\n")
        self.trace.append(line)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def chance(self, name: str, probability: float) -> bool:
        """Draw whether a fault happens now. None happens once the world is calm."""
        happens = not self.is_calm and self.random.random() < probability
        if happens:
            self.faults[name] = self.faults.get(name, 0) + 1
            self.note(f"fault {name}")
        return happens

    def route_delay(self) -> float:
        """Draw the time from a worker's connection to the moment when it is routable."""
        return self.random.random() * 4.0 if self.chance("routes late", self.rates.routes_late) else self.delay()

    def delay(self) -> float:
        """Draw the latency of one frame."""
        return self.random.random() ** 4 * self.rates.latency_s + 1e-5

    def alive(self) -> "list[Process]":
        return list(self._alive.values())

    def bury(self, process: "Process") -> None:
        """Note that a process has exited."""
        del self._alive[process.pid]
        self.own_bytes -= process.worker.own_bytes

    def jump(self, seconds: float) -> None:
        self.loop.jump(seconds)
        self.jumped_at = self.loop.time()

    def is_sound(self, label: str) -> bool:
        """Whether a worker, such as "a#3", has done nothing for some time that a gateway may take for a fault."""
        return any(process.is_sound for process in self.alive() if process.label == label)

    def start(self, spec: WorkerSpec) -> "Process":
        self._next_pid += 1
        process = self.processes[self._next_pid] = self._alive[self._next_pid] = Process(self, self._next_pid, spec)
        self.own_bytes += process.worker.own_bytes
        self.note(f"spawn {process.label}")
        return process


class Process:
    """Worker process: it runs, is stopped (SIGSTOP) or has exited. Its exit cuts off frames that are on their way."""

    def __init__(self, world: World, pid: int, spec: WorkerSpec) -> None:
        self.world = world
        self.pid = pid
        self.spec = spec
        self.argv = ["python", "worker", spec.name, "--epoch", str(spec.epoch)]
        self.status: int | None = None
        self.is_stopped = False
        # When it was most recently stopped, or lost a message.
        self.impaired_at = -math.inf
        self.connection: Connection | None = None
        self.backlog: list[bytes] = []
        self._held: list[Callable[[], None]] = []
        self._exits: list[asyncio.Future[None]] = []
        self.worker = SimulatedWorker(self)
        self.connect()
        world.loop.call_later(world.random.random() * 0.3 + 0.01, self.when_running, self.worker.begin)

    @property
    def is_alive(self) -> bool:
        return self.status is None

    @property
    def label(self) -> str:
        return f"{self.spec.name}#{self.spec.epoch}"

    @property
    def is_sound(self) -> bool:
        since_s = self.world.loop.time() - max(self.impaired_at, self.world.jumped_at)
        is_running = self.is_alive and not self.is_stopped
        return is_running and not self.worker.is_stuck and not self.worker.is_ending and since_s > SOUND_S

    def when_running(self, act: Callable[[], None]) -> None:
        """Act now, at SIGCONT if the process is stopped, never if it has exited."""
        if self.is_stopped:
            self._held.append(act)
        elif self.is_alive:
            act()

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        self.world.loop.call_later(delay_s, self.when_running, act)

    def connect(self) -> None:
        """Connect to the gateway of this moment after a while, or to its successor."""
        self.world.loop.call_later(self.world.random.random() * 0.1 + 0.001, self._connect)

    def _connect(self) -> None:
        wire = self.world.wire
        if not self.is_alive or wire is None or not wire.is_open:
            return
        if self.connection is not None and self.connection.wire is wire:
            return
        self.connection = wire.connections[self.spec.identity] = Connection(wire, self)
        self.later(self.world.route_delay(), self.connection.greet)
        backlog, self.backlog = self.backlog, []
        for frame in backlog:
            self.connection.up(frame)

    def send(self, frame: bytes) -> None:
        if self.connection is not None and self.connection.wire.is_open:
            self.connection.up(frame)
        else:
            self.backlog.append(frame)

    def signal(self, signum: int) -> None:
        if not self.is_alive:
            return
        match signum:
            case signal.SIGSTOP:
                self.is_stopped = True
            case signal.SIGCONT:
                self.is_stopped = False
                self.impaired_at = self.world.loop.time()
                held, self._held = self._held, []
                for act in held:
                    self.when_running(act)
            case signal.SIGKILL:
                self.exit(-signum)
            case signal.SIGABRT:
                self.when_running(lambda: self.exit(-signal.SIGABRT))
            case _:
                self.when_running(self.worker.on_sigterm)

    def exit(self, status: int) -> None:
        if not self.is_alive:
            return
        self.status = status
        self.world.note(f"exit {self.label} {status}")
        self.world.bury(self)
        self.world.machine.free_later(self)
        if self.connection is not None:
            self.connection.cut(is_orderly=status >= 0)
        for future in self._exits:
            # The gateway learns of the exit a little later.
            self.world.loop.call_later(self.world.random.random() * 0.005, _wake, future)

    async def wait(self) -> None:
        if not self.is_alive:
            return
        future = self.world.loop.create_future()
        self._exits.append(future)
        await future


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Connection:
    """Connection of a worker to one gateway: frames keep their order in each direction."""

    def __init__(self, wire: "SimulatedWire", process: Process) -> None:
        self.wire = wire
        self.process = process
        self.is_closed = False
        # Whether the worker's greeting has reached the gateway's ROUTER. Frames to the gateway take another socket.
        self.is_routable = False
        self._up_at = self._down_at = 0.0
        self._rising: deque[bytes] = deque()
        self._lost = False

    def greet(self) -> None:
        """Make the worker routable."""
        if not self._lost and self.wire.is_open:
            self.is_routable = True
            self.wire.greetings += 1

    def up(self, frame: bytes) -> None:
        loop = self.process.world.loop
        self._up_at = max(self._up_at, loop.time() + self.process.world.delay())
        self._rising.append(frame)
        loop.call_at(self._up_at, self._arrive)

    def _arrive(self) -> None:
        # One timer may deliver the frame of another: their order is that of sending.
        if self._rising:
            self.wire.arrive(self._rising.popleft())

    def down(self, frame: bytes) -> None:
        loop = self.process.world.loop
        if self._lost:
            return
        self._down_at = max(self._down_at, loop.time() + self.process.world.delay())
        loop.call_at(self._down_at, self._reach, frame)

    def _reach(self, frame: bytes) -> None:
        if not self._lost and self.wire.is_open:
            self.process.when_running(lambda: self.process.worker.receive(frame))

    def cut(self, *, is_orderly: bool) -> None:
        """End with the process. A worker that exits sends what it has; one that is killed loses the newest frames."""
        self._lost = True
        random, loop = self.process.world.random, self.process.world.loop
        if not is_orderly:
            for _ in range(random.randint(0, len(self._rising))):
                self._rising.pop()
        # For some milliseconds a send to a process that has gone succeeds.
        loop.call_later(random.random() * 0.02, self._close)

    def _close(self) -> None:
        self.is_closed = True


class SimulatedWire:
    """The gateway's side of all connections. It implements `gateway.link.transport.Wire`."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.connections: dict[bytes, Connection] = {}
        self.is_open = False
        # Number of greetings that were not dropped.
        self.greetings = 0
        self._arrived: deque[bytes] = deque()
        self._read: Callable[[], None] | None = None
        self._is_scheduled = False

    def open(self) -> None:
        self.is_open = True
        self.world.wire = self
        for process in self.world.alive():
            process.connect()

    def close(self) -> None:
        self.is_open = False
        self._arrived.clear()

    def watch(self, read: Callable[[], None]) -> Callable[[], None]:
        self._read = read

        def unwatch() -> None:
            self._read = None

        return unwatch

    def arrive(self, frame: bytes) -> None:
        if not self.is_open:
            return
        self._arrived.append(frame)
        if not self._is_scheduled:
            self._is_scheduled = True
            self.world.loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._is_scheduled = False
        if self._read is not None:
            self._read()

    def receive(self) -> bytes | None:
        return self._arrived.popleft() if self._arrived else None

    def send(self, identity: bytes, frame: bytes) -> None:
        connection = self.connections.get(identity)
        if not self.is_open or connection is None or connection.is_closed or not connection.is_routable:
            raise WorkerGone(identity.decode())
        connection.down(frame)

    def drop_greetings(self) -> None:
        self.greetings = 0


@dataclass(slots=True)
class Machine:
    """Host memory: what workers hold, what ended processes have not returned, and what another program takes."""

    world: World
    total: int = 16 * GIB
    other: int = 0
    returning: dict[int, int] = field(default_factory=dict[int, int])

    def budget(self) -> int:
        return self.total

    def held(self) -> int:
        return sum(process.worker.footprint for process in self.world.alive()) + sum(self.returning.values())

    def available(self) -> int:
        return max(0, self.total + GIB - self.other - self.held())

    def footprint(self, pid: int) -> int:
        process = self.world.processes.get(pid)
        if process is None:
            return 0
        return process.worker.footprint if process.is_alive else self.returning.get(pid, 0)

    def unreturned(self, pid: int, footprint: int, available_before: int) -> int:
        return self.returning.get(pid, 0)

    def free_later(self, process: Process) -> None:
        self.returning[process.pid] = process.worker.footprint
        # Gateways poll for late memory many times a second, so most of it is back soon.
        delay_s = self.world.random.random() ** 6 * 1.5
        self.world.loop.call_later(delay_s, self.returning.pop, process.pid, None)


class ProcessTable:
    """Processes as one gateway sees them. It implements the registry's `ProcessTable`."""

    def __init__(self, world: World, registry: Registry) -> None:
        self.world = world
        self.registry = registry
        # A gateway that was killed has no effect any more, whatever its tasks still do.
        self.is_dead = False

    def spawn(self, spec: WorkerSpec) -> WorkerPort:
        if self.is_dead or self.world.chance("spawn", self.world.rates.spawn_fails):
            raise OSError("no more processes")
        clones = [p for p in self.world.alive() if p.spec.name == spec.name]
        if clones:
            raise Violated(f"{spec.name}#{spec.epoch} is started beside #{clones[0].spec.epoch}")
        process = self.world.start(spec)
        self.registry.add(WorkerRecord(pid=process.pid, epoch=spec.epoch, argv=process.argv, spec=spec))
        return Port(self, process, is_adopted=False)

    def running(self) -> list[Survivor]:
        return [
            Survivor(
                process.spec.name, ProcessIdentity(pid=process.pid, epoch=process.spec.epoch, argv=process.argv), None
            )
            for process in self.world.alive()
        ]

    def adopt(self, survivor: Survivor) -> WorkerPort:
        self.world.note(f"adopt {survivor.name}#{survivor.process.epoch}")
        return Port(self, self.world.processes[survivor.process.pid], is_adopted=True)

    def mismatch(self, process: ProcessIdentity) -> str:
        current = self.world.processes.get(process.pid)
        if current is None or not current.is_alive:
            return "it has ended"
        return "" if current.argv == process.argv else "its pid is another process's"


class Port:
    """A process as one gateway sees it. It implements `WorkerPort`."""

    def __init__(self, table: ProcessTable, process: Process, *, is_adopted: bool) -> None:
        self._table = table
        self._process = process
        self.is_adopted = is_adopted

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int | None:
        await self._process.wait()
        return None if self.is_adopted else self._process.status

    def signal(self, signum: int) -> None:
        if not self._table.is_dead:
            self._process.signal(signum)

    def last_lines(self) -> list[str]:
        return []

    def failure(self) -> Failure | None:
        return None

    def close(self) -> None:
        if not self._table.is_dead:
            self._table.registry.remove(self._process.spec.name)
