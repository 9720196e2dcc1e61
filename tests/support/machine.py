"""A worker's state machine on the real link, without processes and sockets: time, chance and spawning are ours."""

import asyncio
import heapq
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from gateway.link.link import WorkerLink
from gateway.link.sequence import Sequence
from gateway.link.transport import Connection, Report, WorkerGone
from gateway.workers.supervisor.state import Effects, MemoryView, ModelUnavailable, State, WorkerLimits
from gateway.workers.supervisor.worker import Worker
from protocol import PROTOCOL
from protocol.codec import decode_down, encode
from protocol.failures import Code, Failure
from protocol.from_worker import Delta, Finish, Hello, Pong, Ready, Step, Up
from protocol.spec import WorkerSpec
from protocol.stats import Stats
from protocol.to_worker import Down, Generate, Ping, Sampling, TextPrompt
from tests.support.scale import patient


class FakeProcess:
    def __init__(self, pid: int, *, is_adopted: bool = False) -> None:
        self.pid = pid
        self.is_adopted = is_adopted
        self.signals: list[int] = []
        self.is_closed = False
        self._status: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    @property
    def has_exited(self) -> bool:
        return self._status.done()

    async def wait(self) -> int | None:
        return await asyncio.shield(self._status)

    def signal(self, signum: int) -> None:
        self.signals.append(signum)

    def last_lines(self) -> list[str]:
        return ["last words"]

    def failure(self) -> Failure | None:
        return None

    def close(self) -> None:
        self.is_closed = True

    def exit(self, status: int | None) -> None:
        self._status.set_result(status)


class FakeLink(WorkerLink):
    """The real link. Frames to workers go to lists of the world instead of sockets."""

    def __init__(self, world: "FakeWorld", events: "Recorder") -> None:
        super().__init__(Path("/nowhere"), events, boot=77, make_wire=lambda down, up: _FakeWire(world))
        self._world = world

    def attach(
        self, name: str, epoch: int, post: Callable[[Report], None], park: Callable[[Sequence], None]
    ) -> Connection:
        self._world.attached.append(epoch)
        self._world.post = post
        return super().attach(name, epoch, post, park)

    def deliver(self, message: Up) -> None:
        """Handle a message of a worker."""
        self._handle(encode(message))

    def detach(self, epoch: int) -> None:
        self._world.detached.append(epoch)
        super().detach(epoch)

    def fail(self, sequences: Iterable[Sequence], failure: Failure) -> None:
        for sequence in sequences:
            if not sequence.is_over:
                self._world.failed.append(failure)
                self._world.failures[sequence.rid] = failure
                super().fail([sequence], failure)

    def expire(self, sequences: Iterable[Sequence]) -> None:
        self._world.parked = list(sequences)
        super().expire(self._world.parked)

    def sequence(self, rid: int) -> Sequence:
        return self._sequences[rid]


class _FakeWire:
    """A wire to workers that receives nothing."""

    is_open = True

    def __init__(self, world: "FakeWorld") -> None:
        self._world = world

    def open(self) -> None: ...
    def close(self) -> None: ...
    def drop_greetings(self) -> None: ...

    def watch(self, read: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def receive(self) -> bytes | None:
        return None

    def send(self, identity: bytes, frame: bytes) -> None:
        world, epoch = self._world, int(identity.rpartition(b"#")[2])
        if world.is_unreachable:
            raise WorkerGone(f"#{epoch}")
        match message := decode_down(frame):
            case Ping():
                world.pings += 1
            case Generate(rid):
                if rid in world.begun:
                    world.resumed.append((epoch, rid))
                world.begun.add(rid)
            case _:
                world.sent.append(message)


class _Submitted:
    """A worker that a request was on its way to before its gate was closed."""

    is_ready = True

    def __init__(self, name: str, epoch: int) -> None:
        self.name = name
        self.epoch = epoch

    def refusal(self, request: Generate) -> Failure | None:
        return None


class FakeWorld:
    """Effects: a clock that only `pass_time` moves, and lists of what was done."""

    def __init__(self, events: "Recorder") -> None:
        self.link = FakeLink(self, events)
        # Where reports of the newest attached worker go.
        self.post: Callable[[Report], None] | None = None
        self.time = 1000.0
        self.jitter = 0.5
        # Stamp of the model's files.
        self.files = 0
        self.epoch = 0
        self.processes: list[FakeProcess] = []
        self.sent: list[Down] = []
        self.pings = 0
        self.failed: list[Failure] = []
        self.failures: dict[int, Failure] = {}
        self.attached: list[int] = []
        self.detached: list[int] = []
        self.sequences: list[Sequence] = []
        # Parked ones at the newest heartbeat that had any.
        self.parked: list[Sequence] = []
        # The rids that were sent before, and those that were sent to a second epoch, in order.
        self.begun: set[int] = set()
        self.resumed: list[tuple[int, int]] = []
        self.is_unreachable = False
        self.spawn_error: OSError | None = None
        self.memory_bytes = 0
        self.denial: Failure | None = None
        self.admission_error: Exception | None = None
        self.entries: list[State] = []
        self.specs: list[WorkerSpec] = []
        self.room = asyncio.Event()
        self.room.set()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    # Effects

    def now(self) -> float:
        return self.time

    async def sleep(self, s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.time + s, next(self._order), future))
        await future

    def random(self) -> float:
        return self.jitter

    def next_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    async def admit(self, spec: WorkerSpec) -> int:
        await self.room.wait()
        if self.admission_error is not None:
            raise self.admission_error
        if self.denial is not None:
            raise ModelUnavailable(self.denial)
        return self.memory_bytes

    def entered(self, model: str, state: State) -> None:
        self.entries.append(state)

    def spawn(self, spec: WorkerSpec) -> FakeProcess:
        if self.spawn_error is not None:
            raise self.spawn_error
        self.specs.append(spec)
        process = FakeProcess(pid=100 + spec.epoch)
        self.processes.append(process)
        return process

    # Tests

    @property
    def process(self) -> FakeProcess:
        return self.processes[-1]

    async def pass_time(self, s: float) -> None:
        """Wake every sleeper that is due, in order, with the clock at its time."""
        end = self.time + s
        await settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            due, _, future = heapq.heappop(self._sleepers)
            self.time = max(self.time, due)
            if not future.done():
                future.set_result(None)
            await settle()
        self.time = end

    def jump(self, s: float) -> None:
        """Time passes while our own loop does not run."""
        self.time += s


class Recorder:
    """Events as lists."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.exits: list[int] = []
        self.loads: list[float] = []
        self.grants: list[tuple[str, str]] = []
        self.swaps: list[str] = []
        self.evictions: list[tuple[str, str]] = []
        self.returns: list[float] = []
        self.trims: list[str] = []
        self.recycles: list[str] = []
        self.refusals: list[str] = []
        self.batch_modes: list[str] = []
        self.views = 0
        self.stale = self.malformed = self.resumes = self.quarantines = self.stuck_workers = self.steps = self.pongs = 0

    def step(self, model: str, step: Step) -> None:
        self.steps += 1

    def pong(self, model: str, pong: Pong) -> None:
        self.pongs += 1

    def worker_exit(self, model: str, status: int) -> None:
        self.exits.append(status)

    def state(self, model: str, state: State) -> None:
        self.states.append(state)

    def load_seconds(self, model: str, s: float) -> None:
        self.loads.append(s)

    def batch_mode(self, model: str, mode: str) -> None:
        self.batch_modes.append(mode)

    def stale_message(self) -> None:
        self.stale += 1

    def malformed_frame(self) -> None:
        self.malformed += 1

    def worker_stuck(self, model: str) -> None:
        self.stuck_workers += 1

    def sequences_resumed(self, model: str, sequences: int) -> None:
        self.resumes += sequences

    def model_removed(self, model: str) -> None:
        raise AssertionError("the pool's, not a worker's")

    def request_quarantined(self, model: str) -> None:
        self.quarantines += 1

    def memory_granted(self, model: str, wait_s: float, reason: str) -> None:
        self.grants.append((model, reason))

    def model_swapped_in(self, model: str, s: float) -> None:
        self.swaps.append(model)

    def model_evicted(self, model: str, reason: str) -> None:
        self.evictions.append((model, reason))

    def memory_returned(self, model: str, part: float) -> None:
        self.returns.append(part)

    def memory_trimmed(self, model: str) -> None:
        self.trims.append(model)

    def memory_refused(self, model: str) -> None:
        self.refusals.append(model)

    def worker_recycled(self, model: str) -> None:
        self.recycles.append(model)

    def memory(self, view: MemoryView) -> None:
        self.views += 1


class Machine:
    """A worker, its world, and what it reported."""

    def __init__(self, *, is_preload: bool = False, limits: WorkerLimits | None = None) -> None:
        self.events = Recorder()
        self.world = FakeWorld(self.events)
        spec = WorkerSpec(name="m", path="p", epoch=0, down="ipc://d", up="ipc://u")
        world = self.world
        self.worker = Worker(
            spec,
            Effects(
                world.link,
                self.events,
                limits or WorkerLimits(),
                world.admit,
                world.entered,
                world.spawn,
                world.next_epoch,
                world.now,
                world.sleep,
                world.random,
                lambda _: world.files,
            ),
            is_preload=is_preload,
        )

    async def __aenter__(self) -> "Machine":
        self._asked: list[asyncio.Task[None]] = []
        self._task = asyncio.create_task(self.worker.run())
        await settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        # Whoever still waits is told, too.
        await asyncio.wait_for(asyncio.gather(*self._asked, return_exceptions=True), patient(5))

    def hello(self, *, protocol: int = PROTOCOL, pid: int | None = None, epoch: int | None = None) -> None:
        worker = self.worker
        own_pid = worker.pid if pid is None else pid
        own_epoch = worker.epoch if epoch is None else epoch
        self.post(Hello(worker.name, own_epoch, own_pid, protocol, 0, "", "", "loading"))

    def ready(self, *, epoch: int | None = None, weights_bytes: int = 0) -> None:
        own_epoch = self.worker.epoch if epoch is None else epoch
        self.post(Ready(own_epoch, "p", 1024, 16, 100, weights_bytes, 1.5))

    def pong(self, *, running: int = 0, step_age_ms: int = 0) -> None:
        self.post(Pong(0, 0, Stats(running, 0, 0, step_age_ms, 0, 0, 0, 0)))

    def post(self, report: Report) -> None:
        """What the link hands on of a worker that has been attached."""
        if self.world.post is not None:
            self.world.post(report)

    def run(self, text: str = "hi", tokens: int = 0) -> Sequence:
        """A sequence that the worker has, and has sent `tokens` of."""
        link, epoch = self.world.link, self.worker.epoch
        request = Generate(len(self.world.sequences) + 1, TextPrompt(text), Sampling())
        link.submit(_Submitted(self.worker.name, epoch), [request])
        sequence = link.sequence(request.rid)
        self.world.sequences.append(sequence)
        if tokens:
            self.say(epoch, Delta(request.rid, token_ids=tuple(range(tokens))))
        return sequence

    def say(self, epoch: int, *deltas: Delta) -> None:
        """A step of the worker."""
        self.world.link.deliver(Step(epoch, 1, list(deltas)))

    def give_up(self, sequence: Sequence) -> None:
        """Its worker ends it, and not for any fault of its own."""
        lost = Failure(Code.WORKER_DIED, "lost its gateway")
        self.say(sequence.epoch, Delta(sequence.rid, finish=Finish.ERROR, failure=lost))

    def leave(self, sequence: Sequence) -> None:
        """Its client leaves."""
        self.world.link.abort([sequence.rid], "client")

    async def speak(self, sequence: Sequence) -> None:
        """Its worker sends a token of it."""
        self.say(sequence.epoch, Delta(sequence.rid, token_ids=(0,)))
        await settle()

    def lose_touch(self) -> None:
        """A request cannot be sent to the worker, for a moment."""
        was_unreachable, self.world.is_unreachable = self.world.is_unreachable, True
        with pytest.raises(WorkerGone):
            self.run()
        self.world.is_unreachable = was_unreachable

    async def succeed(self) -> None:
        """The successor, which is on its way already, becomes ready."""
        self.hello()
        self.ready()
        await settle()

    async def ask(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.worker.ensure_ready())
        self._asked.append(task)
        await settle()
        return task

    async def bring_up(self, *, weights_bytes: int = 0) -> None:
        task = await self.ask()
        self.hello()
        self.ready(weights_bytes=weights_bytes)
        await settle()
        await task

    async def crash(self, status: int = -9) -> None:
        self.world.process.exit(status)
        await settle()
        # Exits with a status may be followed by last words for a moment.
        await self.world.pass_time(0.05)


async def settle() -> None:
    """Let everything that can run now run."""
    for _ in range(12):
        await asyncio.sleep(0)
