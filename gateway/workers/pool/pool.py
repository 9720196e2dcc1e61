"""Pool of workers, one for each model that runs."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gateway.config.settings import Config, ModelConfig
from gateway.config.worker_spec import loads_alike, worker_spec
from gateway.link.link import WorkerLink
from gateway.model_files.known_times import KnownTimes
from gateway.workers.memory.broker import Broker
from gateway.workers.memory.host import HostMemory, ThisMachine
from gateway.workers.memory.ttl_and_pressure import MemoryWatch
from gateway.workers.pool.orphans import objection, stop_leftovers
from gateway.workers.supervisor.handle import WorkerHandle
from gateway.workers.supervisor.ports import Effects, WorkerPort
from gateway.workers.supervisor.registry import Registry, Survivor
from gateway.workers.supervisor.spawn import Command, Spawner, default_command
from gateway.workers.supervisor.state import (
    Events,
    MemoryView,
    ModelUnavailable,
    State,
    WorkerLimits,
    WorkerView,
)
from gateway.workers.supervisor.worker import Worker
from protocol.failures import Code, Failure
from protocol.spec import WorkerSpec
from protocol.timing_profile import wisdom_dir

log = logging.getLogger(__name__)

RELEASE_POLL_S = 0.02
_HANDED_OVER = Failure(Code.DRAINING, "the server is being restarted")


class Pool:
    """The workers of all configured models. `start` comes first; every method belongs to its event loop."""

    def __init__(
        self,
        config: Config,
        link: WorkerLink,
        events: Events,
        *,
        command: Command = default_command,
        limits: WorkerLimits | None = None,
        machine: HostMemory | None = None,
    ) -> None:
        self._config = config
        self._link = link
        self._events = events
        self._limits = limits or WorkerLimits()
        self._command = command
        # All that there are; those of models that were removed stay until they have stopped.
        self._workers: dict[str, Worker] = {}
        self._removed: set[str] = set()
        # Those of another version's workers, which are stopped at the start.
        self._reloaded: set[str] = set()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self.times = KnownTimes(wisdom_dir(config.home))
        self._broker = Broker(
            config, self._workers, link, events, machine or ThisMachine(), self._limits, time.monotonic, self.times
        )
        self._effects: Effects | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._is_started = asyncio.Event()
        self._root: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind the link, adopt or stop what an earlier gateway left, and begin the preloads.

        The run directory's lock must be held. Loads wait until unwanted leftovers are gone; adoption does not.
        """
        registry = Registry(self._config.run_dir)
        spawner = Spawner(self._config.home, registry, self._command)
        self._effects = Effects(self._broker.admit, self._broker.on_state, spawner.spawn, registry.next_epoch)
        for model in self._config.models.values():
            self._workers[model.name] = self._make(model, self._effects)
        unwanted = [survivor for survivor in registry.survivors() if not self._adopt(survivor, spawner)]
        self._link.open()
        self._root = asyncio.create_task(self._run([spawner.adopt(survivor) for survivor in unwanted]))
        await self._is_started.wait()

    def _adopt(self, survivor: Survivor, spawner: Spawner) -> bool:
        """Whether an earlier gateway's worker is what the configuration wants; otherwise it is to be stopped."""
        worker, process = self._workers.get(survivor.name), survivor.process
        refused = objection(survivor, worker.spec if worker is not None else None)
        if refused is None:
            assert worker is not None
            assert survivor.spec is not None
            log.info("adopting worker %s#%d (pid %d)", worker.name, process.epoch, process.pid)
            self._broker.adopt(worker.name, survivor.spec.memory_bytes)
            worker.adopt(spawner.adopt(survivor), process.epoch)
            return True
        if refused.is_loaded_again:
            self._reloaded.add(survivor.name)
        log.info("stopping worker %s#%d (pid %d): %s", survivor.name, process.epoch, process.pid, refused.reason)
        return False

    async def wait(self) -> None:
        """Return when the pool was stopped; raises what broke it."""
        assert self._root is not None, "start() comes first"
        await asyncio.wait([self._root])
        if not self._root.cancelled():
            self._root.result()

    async def stop(self, deadline_s: float) -> None:
        """Refuse new requests, let running ones finish until the deadline, then stop every worker gently."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers.values():
                tasks.create_task(worker.stop(deadline_s, is_closing=True))
        if self._root is not None:
            self._root.cancel()
            await asyncio.wait([self._root])
        self._link.close()

    async def release(self, deadline_s: float, hurry: asyncio.Task[object]) -> None:
        """Let running requests finish until the deadline or `hurry`, then leave every worker to the next gateway."""
        end = time.monotonic() + deadline_s
        while self._link.in_flight and time.monotonic() < end and not hurry.done():
            await asyncio.wait({hurry}, timeout=RELEASE_POLL_S)
        self._link.abandon(_HANDED_OVER)
        if self._root is not None:
            self._root.cancel()
            await asyncio.wait([self._root])
        self._link.close()

    async def stop_now(self, grace_s: float = 2.0) -> None:
        """Abort what runs, and kill what has not stopped within the grace. Joins a `stop` that is under way."""
        kill = asyncio.get_running_loop().call_later(grace_s, self._kill)
        try:
            async with asyncio.TaskGroup() as tasks:
                for worker in self._workers.values():
                    tasks.create_task(worker.stop(0.0, is_closing=True))
        finally:
            kill.cancel()

    async def ensure_ready(self, model: str) -> WorkerHandle:
        """The worker of `model`, loaded. Without a task switch when it is. Raises `ModelUnavailable`."""
        worker = self._configured(model)
        if not worker.is_ready:
            await worker.ensure_ready()
        return worker

    def busy(self, model: str) -> "Lease":
        """Hold the model from before `ensure_ready` to the end of the request."""
        return Lease(self._workers[model].name, self._broker)

    def leases(self, model: str) -> int:
        """The number of requests that hold the model."""
        return self._broker.leases(model)

    def apply(self, config: Config) -> "AppliedConfig":
        """Apply `config`. Workers whose settings changed are restarted, and their streams pause until they are back.

        A model that was removed finishes what it does until the drain's deadline, and then stops.
        """
        old, self._config = self._config, config
        self._broker.configure(config)
        removed = [name for name in old.models if name not in config.models]
        added = [model for name, model in config.models.items() if name not in old.models]
        kept = [(old.models[name], model) for name, model in config.models.items() if name in old.models]
        for name in removed:
            self._removed.add(name)
            self._run_task(self._retire(self._workers[name]))
        for model in added:
            self._add(model)
        restarted = [model.name for before, model in kept if self._change(old, before, model)]
        return AppliedConfig([model.name for model in added], removed, restarted)

    def would_restart(self, config: Config) -> list[str]:
        """Models whose resident workers `apply` would restart."""
        old = self._config
        kept = [(old.models[name], model) for name, model in config.models.items() if name in old.models]
        changed = (model for before, model in kept if self._loads_otherwise(old, before, config, model))
        return [model.name for model in changed if self._workers[model.name].is_resident]

    async def load(self, model: str) -> None:
        """Load now, also after failures. Raises `ModelUnavailable`."""
        await self._configured(model).load()

    async def unload(self, model: str) -> None:
        """Finish what runs, then stop the worker. The next request loads it again."""
        await self._configured(model).stop(self._config.server.drain_s)

    async def restart(self, model: str) -> None:
        """Stop and start; what runs pauses meanwhile. Raises `ModelUnavailable`."""
        await self._configured(model).restart()

    async def pin(self, model: str) -> None:
        """Keep a model whoever else is asked for, until the daemon ends or it is unpinned."""
        self._broker.pin(model, True)

    async def unpin(self, model: str) -> None:
        self._broker.pin(model, False)

    def is_pinned(self, model: str) -> bool:
        return self._broker.is_pinned(model)

    def memory(self) -> MemoryView:
        return self._broker.view()

    def workers(self) -> list[WorkerView]:
        """Those of configured models, in the order of the configuration."""
        return [self._workers[name].view() for name in self._config.models if name in self._workers]

    def worker(self, model: str) -> WorkerHandle:
        """The worker of a configured model, in whatever state it is."""
        return self._workers[model]

    def handles(self) -> list[WorkerHandle]:
        """Every worker, of models that were removed too until they have stopped."""
        return list(self._workers.values())

    def load_left_s(self, model: str) -> float:
        """About how long a model that is not ready takes until it is, by its newest loads; 0 where that is unknown."""
        worker = self._workers.get(model)
        if worker is None or worker.state is State.READY:
            return 0.0
        view = worker.view()
        load_s = self.times.load_s(model, view.path)
        return max(0.0, load_s - view.since_s) if view.state is State.LOADING else load_s

    def find(self, model: str) -> WorkerHandle | None:
        """The worker of a model, None for one that is not configured here."""
        return self._workers.get(model)

    async def _run(self, unwanted: Sequence[WorkerPort]) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for worker in self._workers.values():
                self._runs[worker.name] = tasks.create_task(worker.run())
            # After them: the link ends workers that it does not know, and by then the adopted ones are attached.
            tasks.create_task(self._link.run())
            tasks.create_task(self._grant_memory(unwanted))
            watch = MemoryWatch(self._broker, self.worker, self._events, self._limits, time.monotonic, asyncio.sleep)
            tasks.create_task(watch.run())
            # In the order of the file, those that nothing displaces first.
            for worker in sorted(self._workers.values(), key=lambda worker: not self.is_pinned(worker.name)):
                if worker.is_preload or worker.name in self._reloaded:
                    tasks.create_task(_preload(worker))
            self._is_started.set()

    # -- changes of the configuration --------------------------------------------------------------------------------

    def _configured(self, model: str) -> WorkerHandle:
        """Raises `ModelUnavailable` for a model that was removed since its request came."""
        if model in self._removed or model not in self._workers:
            raise ModelUnavailable(_gone(model))
        return self._workers[model]

    def _add(self, model: ModelConfig) -> None:
        worker = self._workers.get(model.name)
        if worker is not None:
            # It was removed a moment ago and has not stopped yet: two of one name never run.
            self._removed.discard(model.name)
            worker.change(self._spec(model), model.load_timeout_s, is_preload=model.preload, is_reload=True)
        else:
            assert self._effects is not None, "start() comes first"
            worker = self._workers[model.name] = self._make(model, self._effects)
            self._runs[model.name] = self._run_task(worker.run())
        if model.preload:
            self._run_task(_preload(worker))

    def _change(self, old: Config, before: ModelConfig, model: ModelConfig) -> bool:
        """Returns whether a resident worker is restarted."""
        worker, spec = self._workers[model.name], self._spec(model)
        is_other = self._loads_otherwise(old, before, self._config, model)
        worker.change(spec, model.load_timeout_s, is_preload=model.preload, is_reload=is_other)
        if model.preload and not before.preload:
            self._run_task(_preload(worker))
        return is_other and worker.is_resident

    def _loads_otherwise(self, old: Config, before: ModelConfig, config: Config, model: ModelConfig) -> bool:
        """Whether a worker of the model has to be another one under `config`."""
        return before.cache != model.cache or not loads_alike(self._spec(before, old), self._spec(model, config))

    async def _retire(self, worker: Worker) -> None:
        name = worker.name
        if name not in self._removed:
            return
        await worker.stop(self._config.server.drain_s, reason=_gone(name))
        # It may be wanted again by now, or have been removed once more and be gone.
        if name in self._removed and self._workers.get(name) is worker:
            self._removed.discard(name)
            del self._workers[name]
            self._runs.pop(name).cancel()
            self._events.model_removed(name)

    def _run_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "start() comes first"
        return self._tasks.create_task(work)

    def _make(self, model: ModelConfig, effects: Effects) -> Worker:
        return Worker(
            self._spec(model),
            effects=effects,
            link=self._link,
            events=self._events,
            limits=self._limits,
            load_timeout_s=model.load_timeout_s,
            is_preload=model.preload,
        )

    async def _grant_memory(self, unwanted: Sequence[WorkerPort]) -> None:
        """Nothing is granted while leftovers may still hold the memory that it needs."""
        await stop_leftovers(unwanted)
        await self._broker.run()

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def _spec(self, model: ModelConfig, config: Config | None = None) -> WorkerSpec:
        return worker_spec(config or self._config, model, self._link.down, self._link.up)


@dataclass(frozen=True, slots=True)
class AppliedConfig:
    """The models that a new configuration added, removed and restarted."""

    added: list[str]
    removed: list[str]
    restarted: list[str]


class Lease:
    """A request's hold on a model: while one exists, the model is busy."""

    __slots__ = ("_broker", "_model")

    def __init__(self, model: str, broker: Broker) -> None:
        self._model = model
        self._broker = broker

    def __enter__(self) -> Self:
        self._broker.hold(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broker.release(self._model)


def _gone(model: str) -> Failure:
    return Failure(Code.MODEL_MISSING, f"model '{model}' was removed from the configuration")


async def _preload(worker: WorkerHandle) -> None:
    try:
        await worker.ensure_ready()
    except ModelUnavailable as error:
        log.error("model %s was not preloaded: %s", worker.name, error)
