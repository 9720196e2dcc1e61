"""Effects of workers' state machines: the real clock, chance and processes, memory, and the machines of groups."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from gateway.config.settings import Config
from gateway.workers.memory.broker import Broker
from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.ranks import RankStarter, is_local
from gateway.workers.supervisor.registry import Registry
from gateway.workers.supervisor.spawn import Spawner
from gateway.workers.supervisor.state import ModelUnavailable, State
from protocol.failures import Code, Failure
from protocol.spec import WorkerSpec


class RemoteHosts(Protocol):
    """Port to the other machines of groups: their memory, and starts of ranks there."""

    @property
    def starters(self) -> Mapping[str, RankStarter]: ...
    async def admit(self, spec: WorkerSpec, admit: Callable[[], Awaitable[int]], withdraw: Callable[[], None]) -> int:
        """Return when all machines of a group have granted its memory: the share of this one, which `admit` asks for.

        Raises `ModelUnavailable`.
        """
        ...

    def apply(self, config: Config) -> None: ...
    def entered(self, model: str, state: State) -> None: ...


class RealEffects:
    """The real clock, chance and processes."""

    def __init__(
        self,
        registry: Registry,
        spawner: Spawner,
        is_cleared: asyncio.Event,
        broker: Broker,
        elsewhere: RemoteHosts | None,
    ) -> None:
        self._broker = broker
        self._elsewhere = elsewhere
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
        broker, name = self._broker, spec.name
        if spec.group is None or is_local(spec.group):
            return await broker.admit(name)
        if self._elsewhere is None:
            raise ModelUnavailable(Failure(Code.BAD_CONFIG, f"model '{name}': there are no other machines here"))
        return await self._elsewhere.admit(spec, lambda: broker.admit(name), lambda: broker.withdraw(name))

    def overload(self, model: str) -> Failure | None:
        return self._broker.overload(model)

    def entered(self, model: str, state: State) -> None:
        self._broker.entered(model, state)
        if self._elsewhere is not None:
            self._elsewhere.entered(model, state)

    def spawn(self, spec: WorkerSpec) -> WorkerPort:
        return self._spawner.spawn(spec)
