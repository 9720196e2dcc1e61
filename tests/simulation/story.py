"""One seed's story: gateways one after another in one home, requests, operators' commands and faults."""

import asyncio
import contextlib
import logging
import shutil
import signal
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from gateway.access.key import Key
from gateway.access.key_file import KeyFile, KeyRefused
from gateway.app import App
from gateway.config.settings import Config, MemoryConfig, ModelConfig, ServerConfig
from gateway.errors import Unavailable
from gateway.link.link import WorkerLink
from gateway.reload import Reloader
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool.pool import Pool
from gateway.workers.supervisor.registry import Registry
from gateway.workers.supervisor.state import ModelUnavailable
from tests.simulation.client import Client, Plan, draw_plan
from tests.simulation.virtual_loop import NumberedTask, Stalled, VirtualLoop
from tests.simulation.world import GIB, ProcessTable, Rates, SimulatedWire, Violated, World

MODELS = ("a", "b", "c")
KEYS = ("alice", "bob")
SPAN_S = 40.0
# Everything has ended this long after the last request, whatever has happened. Six jumps of the clock count too.
LIVENESS_S = 900.0 + 6 * 400.0
LOAD_TIMEOUT_S = 20.0


class Faults(logging.Handler):
    """Keeps errors with a traceback that the gateway logs: each is a defect of it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info is not None:
            self.records.append(logging.Formatter().format(record))


@dataclass(slots=True)
class Result:
    """Outcome of one seed."""

    seed: int
    digest: str
    trace: list[str]
    faults: dict[str, int]
    turns: int
    virtual_s: float
    failure: BaseException | None = None


def draw_rates(random: Random) -> Rates:
    """Draw how stormy a seed is: a third of the seeds is calm, and any fault may be absent."""
    storm = random.choice((0.0, 0.3, 1.0, 1.0, 3.0, 8.0))

    def rate(most: float) -> float:
        return min(0.9, storm * most * random.random()) if random.random() < 0.6 else 0.0

    return Rates(
        spawn_fails=rate(0.05),
        load_fails=rate(0.1),
        load_hangs=rate(0.05),
        dies=rate(0.01),
        hangs=rate(0.003),
        stops=rate(0.003),
        nonsense=rate(0.02),
        twice=rate(0.05),
        lies=rate(0.05),
        ignores_shutdown=rate(0.2),
        latency_s=random.choice((0.0002, 0.002, 0.05, 0.4)),
    )


class SimulatedGateway:
    """One life of the gateway: the real pool, link, app and services on the world's wire and processes."""

    def __init__(self, world: World, config: Config, boot: int, random: Random, is_listening: asyncio.Event) -> None:
        self.world = world
        self.is_listening = is_listening
        self.config = config
        self.metrics = Metrics()
        self.wire = SimulatedWire(world)
        clock = world.loop.time
        self.link = WorkerLink(config.run_dir, self.metrics, boot=boot, make_wire=lambda down, up: self.wire)
        self.table: ProcessTable | None = None
        self.pool = Pool(
            config,
            self.link,
            self.metrics,
            machine=world.machine,
            make_processes=self._make_processes,
            clock=clock,
            random=random.random,
        )
        self.app = App(config, self.pool, self.link, self.metrics, clock=clock)
        self.wanted = config
        self.reloader = Reloader(self.app, lambda: self.wanted)
        self.tasks: set[asyncio.Task[None]] = set()

    def _make_processes(self, registry: Registry) -> ProcessTable:
        self.table = ProcessTable(self.world, registry, self.config.run_dir)
        return self.table

    async def start(self) -> None:
        # Background responses are not simulated: `App.start` resumes them with threads of its own.
        await self.pool.start()

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a request or a command, which ends at the latest with this gateway."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def kill(self) -> None:
        """End as by SIGKILL: from now on nothing that this gateway does has an effect outside it."""
        assert self.table is not None
        self.table.is_dead = True
        self.wire.close()
        for task in list(self.tasks):
            task.cancel()
        root = self.pool._root  # pyright: ignore[reportPrivateUsage]  # a process that is killed takes its tasks with it
        assert root is not None
        root.cancel()
        await asyncio.wait([root, *self.tasks])
        await self.app.finish(1.0)
        self.app.close()

    async def hand_over(self) -> None:
        """End as by SIGUSR2, with the steps of `Daemon`."""
        self.app.drain()
        self.app.leave()
        never = asyncio.create_task(asyncio.sleep(1e9))
        try:
            await self.pool.release(self.config.server.drain_s, never)
        finally:
            never.cancel()
        self.is_listening.clear()
        await self._end_tasks()
        await self.app.finish(5.0)
        self.app.close()

    async def stop(self) -> None:
        """End as by SIGTERM."""
        self.app.drain()
        await self.pool.stop(self.config.server.drain_s)
        await self._end_tasks()
        await self.app.finish(5.0)
        self.app.close()

    async def _end_tasks(self) -> None:
        if self.tasks:
            _, left = await asyncio.wait(self.tasks, timeout=120.0)
            if left:
                raise Violated(f"{len(left)} requests do not end with their gateway: {left}")

    def check_idle(self) -> None:
        """Check that nothing is left of requests that have ended."""
        services = self.app.services
        left = {
            "sequences": self.link.in_flight,
            "admitted": sum(services.admission.inside(name) for name in MODELS),
            "leases": sum(self.pool.leases(name) for name in MODELS),
            "requests": len(services.requests.views()),
            "unhandled errors": self.metrics.unhandled_errors,
        }
        if any(left.values()):
            raise Violated(f"left behind: {left}")


class Story:
    """Owner of one seed's world, gateways and clients."""

    def __init__(self, seed: int, home: Path, loop: VirtualLoop) -> None:
        self.random = random = Random(seed)
        self.loop = loop
        self.home = home
        self.world = World(loop, random, draw_rates(random))
        self.boots = 0
        self.config = self._draw_config()
        self.secrets = self._make_keys()
        # Whether there is a gateway to which clients can connect.
        self._listening = asyncio.Event()
        self.gateway = self._make_gateway()
        self.clients: list[Client] = []
        self.failure: BaseException | None = None
        loop.on_turn = self.check_turn

    def _draw_config(self) -> Config:
        random = self.random
        names = MODELS[: random.randint(1, 3)]
        models = {
            name: ModelConfig(
                name=name,
                path=f"/nowhere/{name}",
                preload=random.random() < 0.4,
                load_timeout_s=LOAD_TIMEOUT_S,
                memory_bytes=random.choice((3, 6, 7)) * GIB,
                ttl_s=random.choice((0.0, 0.0, 5.0)),
                max_running=random.choice((1, 4, 16)),
                max_waiting=random.choice((1, 100)),
                kind="text",
            )
            for name in names
        }
        server = ServerConfig(
            drain_s=random.choice((0.0, 2.0, 10.0)),
            queue_timeout_s=60.0,
            request_timeout_s=random.choice((0.0, 0.0, 3.0)),
            node="sim",
            body_memory_bytes=1 << 30,
            # The journal of background responses has a thread of its own, which is not simulated.
            response_journal_bytes=0,
            response_store_bytes=0,
        )
        memory = MemoryConfig(budget_bytes=random.choice((8, 12, 16)) * GIB, min_residency_s=random.choice((0.5, 5.0)))
        return Config(home=self.home, server=server, models=models, config_path=self.home / "mlxd.toml", memory=memory)

    def _make_keys(self) -> dict[str, str]:
        self.config.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = KeyFile(self.config.keys_path)
        return {name: file.create(Key(name=name, prefix="", salt="", hash=""))[1] for name in KEYS}

    def _make_gateway(self) -> SimulatedGateway:
        self.boots += 1
        return SimulatedGateway(self.world, self.config, self.boots, self.random, self._listening)

    # -- invariants ----------------------------------------------------------------------------------------------------

    def check_turn(self) -> None:
        """Check what holds at every turn."""
        machine = self.world.machine
        honest = sum(p.worker.footprint - p.worker.overrun for p in self.world.alive() if p.is_recorded)
        if honest > self.config.memory.budget_bytes:  # type: ignore[operator]  # the story's budget is a number
            raise Violated(f"workers hold {honest >> 20} MiB, the budget is {self.config.memory.budget_bytes}")
        if machine.other < 0:
            raise Violated("the machine has lost memory")

    def check_end(self, faults: Faults) -> None:
        """Check that the world is empty after the last gateway has stopped."""
        if alive := [process for process in self.world.alive() if process.is_recorded]:
            raise Violated(f"left running: {[(p.spec.name, p.spec.epoch) for p in alive]}")
        if files := [path.name for path in (self.config.run_dir / "workers").glob("*.json")]:
            raise Violated(f"state files left behind: {files}")
        tasks = [task for task in asyncio.all_tasks(self.loop) if task is not asyncio.current_task()]
        if tasks:
            raise Violated(f"tasks left behind: {tasks}")
        if faults.records:
            raise Violated("the gateway logged an error of its own:\n" + "\n".join(faults.records))

    # -- the story -----------------------------------------------------------------------------------------------------

    async def run(self, faults: Faults) -> None:
        await self.gateway.start()
        self._listening.set()
        count = self.random.choice((2, 6, 12, 25))
        plans = sorted(
            (draw_plan(self.random, i, [*self.config.models], [*KEYS], SPAN_S) for i in range(count)),
            key=lambda plan: plan.at_s,
        )
        requests = [asyncio.create_task(self._request(plan)) for plan in plans]
        events = asyncio.create_task(self._events())
        async with asyncio.timeout(SPAN_S + LIVENESS_S):
            for each in (events, *requests):
                await each
        self.world.is_calm = True
        # Aborted sequences and leases of clients that have left end within a moment.
        await asyncio.sleep(2.0)
        self.gateway.check_idle()
        async with asyncio.timeout(LIVENESS_S):
            await self.gateway.stop()
        self.check_end(faults)

    async def _request(self, plan: Plan) -> None:
        await asyncio.sleep(plan.at_s)
        await self._listening.wait()
        client = Client(self.world, plan)
        self.clients.append(client)
        if plan.leaves_after == 0:
            self.loop.call_later(self.random.random(), client.leave)
        gateway = self.gateway
        task = gateway.run(client.run(gateway.app, self.secrets.get(plan.key, "")))
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()

    async def _events(self) -> None:
        """Give commands of operators and faults of the machine, some in each seed."""
        names = ("unload", "restart", "load", "reload", "die", "hand over", "key", "disk", "jump", "pressure", "stop")
        chosen = [self.random.choice(names) for _ in range(self.random.choice((0, 1, 3, 6)))]
        for name in chosen:
            await asyncio.sleep(self.random.random() * 2 * SPAN_S / len(chosen))
            self.world.note(f"event {name}")
            await self._event(name)

    async def _event(self, name: str) -> None:
        gateway, pool, random = self.gateway, self.gateway.pool, self.random
        model = random.choice([*self.config.models])
        match name:
            case "unload":
                gateway.run(_quietly(pool.unload(model)))
            case "restart":
                gateway.run(_quietly(pool.restart(model)))
            case "load":
                gateway.run(_quietly(pool.load(model)))
            case "reload":
                self._change_config()
                gateway.wanted = self.config
                await gateway.run(_quietly(_reload(gateway.reloader)))
            case "die":
                self._listening.clear()
                await gateway.kill()
                await asyncio.sleep(random.random() * 2)
                await self._next_gateway()
            case "hand over":
                await gateway.hand_over()
                await self._next_gateway()
            case "key":
                if "bob" in self.secrets and random.random() < 0.5:
                    with contextlib.suppress(KeyRefused):
                        KeyFile(self.config.keys_path).revoke("bob")
            case "disk":
                self._fill_disk()
            case "jump":
                self.loop.jump(random.choice((0.5, 20.0, 400.0)))
            case "pressure":
                self.world.machine.other = random.choice((4, 12, 16)) * GIB
                self.loop.call_later(random.random() * 20, self._relax)
            case _:
                if alive := self.world.alive():
                    process = random.choice(alive)
                    process.signal(signal.SIGSTOP)
                    self.loop.call_later(random.choice((1.0, 40.0)), process.signal, signal.SIGCONT)

    async def _next_gateway(self) -> None:
        self.gateway = self._make_gateway()
        await self.gateway.start()
        self._listening.set()

    def _change_config(self) -> None:
        random, models = self.random, dict(self.config.models)
        name = random.choice([*models])
        change: dict[str, object] = random.choice(
            (
                {"context": random.choice((0, 4096, 8192))},
                {"ttl_s": random.choice((0.0, 5.0))},
                {"max_running": random.choice((1, 4))},
                {"preload": True},
            )
        )
        models[name] = msgspec.structs.replace(models[name], **change)
        self.config = msgspec.structs.replace(self.config, models=models)

    def _fill_disk(self) -> None:
        """Make state files and the epoch counter unwritable for some seconds."""
        run_dir = self.config.run_dir
        blocks = [run_dir / "epoch.new", *(run_dir / "workers" / f"{name}.json.new" for name in MODELS)]
        for block in blocks:
            with contextlib.suppress(OSError):
                block.mkdir()

        def free() -> None:
            for block in blocks:
                with contextlib.suppress(OSError):
                    block.rmdir()

        self.loop.call_later(self.random.random() * 10, free)

    def _relax(self) -> None:
        self.world.machine.other = 0


async def _quietly(command: Coroutine[Any, Any, None]) -> None:
    """Run an operator's command, which may be refused."""
    with contextlib.suppress(ModelUnavailable, Unavailable):
        await command


async def _reload(reloader: Reloader) -> None:
    await reloader.reload()


def play(seed: int) -> Result:
    """Play the story of one seed in a home of its own."""
    home = Path(tempfile.mkdtemp(prefix="mlxd-", dir="/dev/shm" if Path("/dev/shm").is_dir() else "/tmp"))
    loop = VirtualLoop(seed, is_shuffled=seed % 2 == 1)
    errors: list[str] = []
    loop.set_exception_handler(lambda _, context: errors.append(str(context)))
    faults, root = Faults(), logging.getLogger()
    root.addHandler(faults)
    asyncio.set_event_loop(loop)
    story = None
    failure: BaseException | None = None
    try:

        async def tell() -> None:
            nonlocal story
            story = Story(seed, home, loop)
            await story.run(faults)

        loop.run_until_complete(tell())
        if errors:
            raise Violated(f"an exception in a callback or a task: {errors}")
    except (Exception, Stalled) as error:
        failure = error
    finally:
        root.removeHandler(faults)
        _close(loop)
        shutil.rmtree(home, ignore_errors=True)
    world = story.world if story is not None else None
    return Result(
        seed,
        world.digest if world is not None else "",
        world.trace if world is not None else [],
        world.faults if world is not None else {},
        loop.turns,
        loop.time(),
        failure,
    )


def _close(loop: VirtualLoop) -> None:
    loop.on_turn = lambda: None
    loop.set_exception_handler(lambda _, context: None)
    tasks = sorted((task for task in asyncio.all_tasks(loop) if isinstance(task, NumberedTask)), key=hash)
    for task in tasks:
        task.cancel()
    if tasks:
        with contextlib.suppress(BaseException):
            loop.run_until_complete(asyncio.wait(tasks, timeout=100))
    asyncio.set_event_loop(None)
    loop.close()
