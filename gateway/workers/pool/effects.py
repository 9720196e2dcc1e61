"""Effects of workers' state machines: the real clock, chance and processes, and memory."""

import asyncio
import random
import time

from gateway.workers.memory.broker import Broker
from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.registry import Registry
from gateway.workers.supervisor.spawn import Spawner
from gateway.workers.supervisor.state import State
from protocol.failures import Failure
from protocol.spec import WorkerSpec


class RealEffects:
    """The real clock, chance and processes."""

    def __init__(self, registry: Registry, spawner: Spawner, is_cleared: asyncio.Event, broker: Broker) -> None:
        self._broker = broker
        self._registry = registry
        self._spawner = spawner
        self._is_cleared = is_cleared

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(s)

    def random(self) -> float:
        return random.random()

    def next_epoch(self) -> int:
        return self._registry.next_epoch()

    async def admit(self, spec: WorkerSpec) -> int:
        """Leftovers may still hold the memory that this worker needs."""
        await self._is_cleared.wait()
        return await self._broker.admit(spec.name)

    def overload(self, model: str) -> Failure | None:
        return self._broker.overload(model)

    def entered(self, model: str, state: State) -> None:
        self._broker.entered(model, state)

    def spawn(self, spec: WorkerSpec) -> WorkerPort:
        return self._spawner.spawn(spec)
