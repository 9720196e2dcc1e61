"""A worker's state machine without processes: time, chance, spawning and the wire are ours."""

import asyncio
import heapq
import itertools
from collections.abc import Iterable

from gateway.link.collector import Collector
from gateway.link.sequence import PARKED, Runner, Sequence, WorkerConnection
from gateway.link.transport import WorkerGone
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.state import MemoryView, ModelUnavailable, State, WorkerLimits
from protocol.failures import Code, Failure
from protocol.messages import MAJOR, MINOR, Down, Generate, Hello, Pong, Ready, Sampling, Step, TextPrompt
from protocol.spec import WorkerSpec
from protocol.stats import Stats
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


class FakeWorld:
    """Effects and wire in one: a clock that only `pass_time` moves, and lists of what was done."""

    boot = 77

    def __init__(self) -> None:
        self.time = 1000.0
        self.jitter = 0.5
        self.epoch = 0
        self.processes: list[FakeProcess] = []
        self.sent: list[Down] = []
        self.pings = 0
        self.failed: list[Failure] = []
        self.failures: dict[int, Failure] = {}
        self.attached: list[int] = []
        self.detached: list[int] = []
        self.sequences: list[Sequence] = []
        # The rids given to each epoch, in order.
        self.resumed: list[tuple[int, int]] = []
        self.is_unreachable = False
        self.spawn_error: OSError | None = None
        self.share_bytes = 0
        self.lack_of_memory: Failure | None = None
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
        return self.share_bytes

    def overload(self, model: str) -> Failure | None:
        return self.lack_of_memory

    def entered(self, model: str, state: State) -> None:
        self.entries.append(state)

    def spawn(self, spec: WorkerSpec) -> FakeProcess:
        if self.spawn_error is not None:
            raise self.spawn_error
        self.specs.append(spec)
        process = FakeProcess(pid=100 + spec.epoch)
        self.processes.append(process)
        return process

    # Wire

    def attach(self, runner: Runner) -> WorkerConnection:
        self.attached.append(runner.epoch)
        return WorkerConnection(runner)

    def detach(self, epoch: int) -> list[Sequence]:
        self.detached.append(epoch)
        lost = [sequence for sequence in self.sequences if sequence.epoch == epoch and not sequence.is_over]
        for sequence in lost:
            sequence.epoch = PARKED
        return lost

    def resume(self, worker: Runner, sequence: Sequence) -> None:
        if self.is_unreachable:
            raise WorkerGone(worker.name)
        sequence.epoch, sequence.given = worker.epoch, len(sequence.token_ids)
        sequence.resumes += 1
        self.resumed.append((worker.epoch, sequence.rid))

    def fail(self, sequences: Iterable[Sequence], failure: Failure) -> None:
        for sequence in sequences:
            if not sequence.is_over:
                sequence.is_over = True
                self.failed.append(failure)
                self.failures[sequence.rid] = failure

    def expire(self, sequences: Iterable[Sequence]) -> None:
        late = [sequence for sequence in sequences if sequence.deadline is not None and self.time >= sequence.deadline]
        self.fail(late, Failure(Code.DEADLINE_EXCEEDED, "late"))

    def send(self, runner: Runner, message: Down) -> None:
        if self.is_unreachable:
            raise WorkerGone(runner.name)
        self.sent.append(message)

    def ping(self, runner: Runner, t_ns: int) -> None:
        self.pings += 1

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
        self.lanes: list[str] = []
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

    def lane(self, model: str, lane: str) -> None:
        self.lanes.append(lane)

    def stale_message(self) -> None:
        self.stale += 1

    def malformed_frame(self) -> None:
        self.malformed += 1

    def stuck(self, model: str) -> None:
        self.stuck_workers += 1

    def resumed(self, model: str, sequences: int) -> None:
        self.resumes += sequences

    def removed(self, model: str) -> None:
        raise AssertionError("the pool's, not a worker's")

    def quarantined(self, model: str) -> None:
        self.quarantines += 1

    def granted(self, model: str, wait_s: float, reason: str) -> None:
        self.grants.append((model, reason))

    def swapped(self, model: str, s: float) -> None:
        self.swaps.append(model)

    def evicted(self, model: str, reason: str) -> None:
        self.evictions.append((model, reason))

    def memory_returned(self, model: str, part: float, s: float) -> None:
        self.returns.append(part)

    def trimmed(self, model: str) -> None:
        self.trims.append(model)

    def refused(self, model: str) -> None:
        self.refusals.append(model)

    def recycled(self, model: str) -> None:
        self.recycles.append(model)

    def memory(self, view: MemoryView) -> None:
        self.views += 1


class Machine:
    """A worker, its world, and what it reported."""

    def __init__(self, *, is_preload: bool = False, limits: WorkerLimits | None = None) -> None:
        self.world = FakeWorld()
        self.events = Recorder()
        spec = WorkerSpec(name="m", path="p", epoch=0, down="ipc://d", up="ipc://u")
        self.worker = WorkerHandle(
            spec,
            effects=self.world,
            wire=self.world,
            events=self.events,
            limits=limits or WorkerLimits(),
            load_timeout_s=600.0,
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

    def hello(
        self, *, major: int = MAJOR, minor: int = MINOR, pid: int | None = None, epoch: int | None = None
    ) -> None:
        worker = self.worker
        own_pid = worker.pid if pid is None else pid
        own_epoch = worker.epoch if epoch is None else epoch
        worker.post(Hello(worker.name, own_epoch, own_pid, major, minor, "", "", "loading"))

    def ready(self, *, epoch: int | None = None, weights_bytes: int = 0) -> None:
        own_epoch = self.worker.epoch if epoch is None else epoch
        self.worker.post(Ready(own_epoch, "p", 1024, 16, 100, weights_bytes, 1.5))

    def pong(self, *, running: int = 0, step_age_ms: int = 0) -> None:
        self.worker.post(Pong(0, 0, Stats(running, 0, 0, step_age_ms, 0, 0, 0, 0)))

    def run(self, text: str = "hi", tokens: int = 0, deadline: float | None = None) -> Sequence:
        """A sequence that the ready worker has, and has sent `tokens` of."""
        request = Generate(len(self.world.sequences) + 1, TextPrompt(text), Sampling())
        sequence = Sequence(request, self.worker, self.worker.epoch, Collector([request.rid]), deadline)
        sequence.token_ids.extend(range(tokens))
        self.world.sequences.append(sequence)
        return sequence

    async def speak(self, sequence: Sequence) -> None:
        """Its worker sends a token of it."""
        sequence.token_ids.append(0)
        if sequence.is_watched:
            sequence.is_watched = False
            self.worker.note_progress()
        await settle()

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
