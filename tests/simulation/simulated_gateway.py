"""One life of the simulated machine's gateway: how it starts, and the ways in which it ends."""

import asyncio
import math
from collections.abc import Coroutine
from random import Random
from typing import Any

import httpx2

from gateway.app import App
from gateway.config.settings import Config
from gateway.link.link import LATE_GRACE_S, RID_BITS, WorkerLink
from gateway.reload import Reloader
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool import Pool
from gateway.workers.supervisor.registry import Registry
from gateway.workers.supervisor.state import WorkerLimits
from tests.simulation.http_edge import HttpEdge
from tests.simulation.simulated_disk import DiskOfProcess, SimulatedDisk, SimulatedThread, abandon_database
from tests.simulation.usage_books import UsageBooks
from tests.simulation.world import ProcessTable, SimulatedWire, Violated, World

LOAD_TIMEOUT_S = 20.0
# A deadline is enforced this long after it, beside the grace that workers have.
LATE_S = 1.0


class SimulatedGateway:
    """One life of the gateway: the real pool, link, app and services on the world's wire, processes and disk."""

    def __init__(
        self,
        world: World,
        config: Config,
        boot: int,
        random: Random,
        is_listening: asyncio.Event,
        disk: SimulatedDisk,
        upstreams: httpx2.AsyncBaseTransport,
        residency_s: float,
    ) -> None:
        self.world = world
        self.is_listening = is_listening
        self.config = config
        self.disk = DiskOfProcess(disk)
        self.disk.on_kill = self.die
        # A gateway that was killed has no effect any more, whatever its tasks still do.
        self.is_dead = False
        self.died: asyncio.Future[None] = world.loop.create_future()
        self.metrics = Metrics()
        self.wire = SimulatedWire(world)
        clock = world.loop.time
        self.link = WorkerLink(config.run_dir, self.metrics, boot=boot, make_wire=lambda down, up: self.wire)
        self.table: ProcessTable | None = None
        self.pool = Pool(
            config,
            self.link,
            self.metrics,
            limits=WorkerLimits(load_s=LOAD_TIMEOUT_S, load_bytes_per_s=math.inf, residency_s=residency_s),
            machine=world.machine,
            make_processes=self._make_processes,
            disk=self.disk,
            clock=clock,
            random=random.random,
        )

        def make_thread(name: str) -> SimulatedThread:
            return SimulatedThread(world.loop, self.disk, name)

        self.app = App(
            config,
            self.pool,
            self.link,
            self.metrics,
            clock=clock,
            wall=clock,
            make_thread=make_thread,
            disk=self.disk,
            transport=upstreams,
        )
        self.boot = boot
        self.books = UsageBooks(world, self.app.services, boot)
        self.wanted = config
        self.reloader = Reloader(self.app, lambda: self.wanted)
        self.tasks: set[asyncio.Task[None]] = set()
        self._chores: list[asyncio.Task[None]] = []
        # It is made for the first client that connects.
        self.edge: HttpEdge | None = None
        # Ends what is left of a killed gateway in this process.
        self.burial: asyncio.Task[None] | None = None

    def _make_processes(self, registry: Registry) -> ProcessTable:
        self.table = ProcessTable(self.world, registry)
        self.table.is_dead = self.is_dead
        return self.table

    async def start(self) -> None:
        self.world.is_wanted = self._wants
        await self.pool.start()
        await self.app.start()
        services = self.app.services
        chores = [services.usage.run(), services.ledger.run()]
        self._chores = [asyncio.create_task(chore) for chore in chores]

    def _wants(self, rid: int) -> bool:
        """Whether a worker may go on with a sequence. What earlier gateways have begun is not checked."""
        is_known = rid in self.link._sequences  # pyright: ignore[reportPrivateUsage]
        return is_known or rid >> RID_BITS != self.boot or not self.wire.is_open

    def http_edge(self) -> HttpEdge:
        if self.edge is None:
            self.edge = HttpEdge(self.app, self.world.loop, self.tasks)
        return self.edge

    def run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a request or a command, which ends at the latest with this gateway."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def die(self) -> None:
        """End as by SIGKILL: from now on nothing that this gateway does has an effect outside it."""
        self.is_dead = self.disk.is_dead = True
        if self.table is not None:
            self.table.is_dead = True
        self.wire.close()
        if self.edge is not None:
            self.edge.die()
        if not self.died.done():
            self.died.set_result(None)

    async def kill(self, lost: Random | None = None) -> None:
        """End as by SIGKILL. With `lost`, the machine loses its power, and the newest stored responses are lost."""
        self.die()
        database = self.app._responses._store._database  # pyright: ignore[reportPrivateUsage]
        abandon_database(database.path, database.close, lost)
        for task in [*self.tasks, *self._chores]:
            task.cancel()
        root = self.pool._root  # pyright: ignore[reportPrivateUsage]  # a process that is killed takes its tasks with it
        if root is not None:
            root.cancel()
        if ending := [*self.tasks, *self._chores, *([] if root is None else [root])]:
            await asyncio.wait(ending)
        self.wire.close()
        self.burial = asyncio.create_task(self._bury())

    async def _bury(self) -> None:
        await self.app.finish(1.0)
        self.app.close()

    async def hand_over(self) -> None:
        """End as by SIGUSR2."""
        self.app.drain()
        # No second signal ends the wait.
        await self.app.hand_over(self.config.server.drain_s, asyncio.create_task(asyncio.sleep(1e9)))
        self.is_listening.clear()
        await self._end()

    async def stop(self) -> None:
        """End as by SIGTERM."""
        self.app.drain()
        await self.app.stop(self.config.server.drain_s)
        self.is_listening.clear()
        await self._end()
        allocations = self.pool.broker.allocations
        if allocations and not self.is_dead:
            raise Violated(f"granted to workers that were stopped: {allocations}")

    async def _end(self) -> None:
        if self.edge is not None:
            await self.edge.shut_down()
        # Readers of background responses end with the responses' tasks.
        await self.app.finish(5.0)
        for chore in self._chores:
            chore.cancel()
        await asyncio.wait(self._chores)
        await self._end_tasks()
        self.app.close()

    async def _end_tasks(self) -> None:
        if self.tasks:
            _, left = await asyncio.wait(self.tasks, timeout=120.0)
            if left:
                raise Violated(f"{len(left)} requests do not end with their gateway: {left}")

    def check_turn(self, budget: int, concurrency: dict[str, int]) -> None:
        """Check that promised shares of memory fit the budget, that each admitted sequence is a key's, and that neither
        the keys' limits of concurrency nor the deadlines are exceeded.
        """
        broker, admission = self.pool.broker, self.app.services.admission
        shares = {name: allocation.memory_bytes for name, allocation in broker.allocations.items()}
        # A worker that takes more than its share keeps what it has, if it does not give it back in time.
        if sum(shares.values()) > budget and "lies" not in self.world.faults:
            raise Violated(f"the shares {shares} exceed the budget {budget}")
        for name, queue in admission._queues.items():  # pyright: ignore[reportPrivateUsage]
            if queue.inside != queue.by_key.total():
                raise Violated(f"{queue.inside} sequences of {name} are admitted, of keys {queue.by_key}")
        for key, limit in concurrency.items():
            if (running := self.metrics.keys[key].sequences) > limit > 0:
                raise Violated(f"{running} sequences of {key} run, its limit is {limit}")
        now = self.world.loop.time()
        if now - self.world.jumped_at < LATE_GRACE_S:
            return  # The timers that a jump of the clock has made late are called soon.
        for sequence in self.link._sequences.values():  # pyright: ignore[reportPrivateUsage]
            if sequence.deadline is not None and now > sequence.deadline + LATE_GRACE_S + LATE_S:
                raise Violated(f"sequence {sequence.rid} runs {now - sequence.deadline:.1f} s after its deadline")

    def check_idle(self) -> None:
        """Check that nothing is left of requests that have ended."""
        services = self.app.services
        responses = self.app._responses  # pyright: ignore[reportPrivateUsage]
        journals = responses._journals  # pyright: ignore[reportPrivateUsage]
        # A prefill of a next turn is no request: it may wait for a worker that hangs.
        turns = {rid for rids in services.next_turns._rids.values() for rid in rids}  # pyright: ignore[reportPrivateUsage]
        sequences = self.link._sequences.keys() - turns  # pyright: ignore[reportPrivateUsage]
        models = [*services.config.models]
        left: dict[str, float] = {
            "sequences": len(sequences),
            "admitted": sum(services.admission.inside(name) for name in models),
            "leases": sum(self.pool.broker.leases(name) for name in models),
            "requests": len(services.requests.views()),
            "unhandled errors": self.metrics.unhandled_errors,
            "tasks": len(services.tasks),
            "bytes of journals": journals._held.total(),  # pyright: ignore[reportPrivateUsage]
            "bytes of bodies": services.bodies.numbers.used_bytes,
            "requests at upstreams": services.upstreams._running,  # pyright: ignore[reportPrivateUsage]
            "connections": 0 if self.edge is None else self.edge.open_connections,
            **self.books.held(),
        }
        if any(left.values()):
            raise Violated(f"left behind: { {what: count for what, count in left.items() if count} }")

    @property
    def running_responses(self) -> int:
        """Number of background responses that are being generated or stored."""
        return len(self.app.services.tasks)
