"""Pool of workers, one for each configured model.

Workers that an earlier gateway left running: reasons not to adopt them, and how they are stopped.
"""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.config.experimental import experiments_of
from gateway.config.settings import Config, ModelConfig
from gateway.config.worker_spec_and_group import loads_alike, tells_prompts, worker_spec
from gateway.disk_and_clock import SYSTEM_DISK, Disk
from gateway.link.link import WorkerLink
from gateway.model_files.known_times import KnownTimes
from gateway.model_files.served_form import model_stamp
from gateway.workers.memory.broker import Broker
from gateway.workers.memory.host import HostMemory, ThisMachine
from gateway.workers.memory.ttl_and_pressure import MemoryWatch
from gateway.workers.supervisor.ranks import is_local
from gateway.workers.supervisor.registry import ProcessTable, Registry, Survivor
from gateway.workers.supervisor.spawn import Command, Spawner, default_command
from gateway.workers.supervisor.state import (
    Effects,
    Events,
    ModelUnavailable,
    State,
    WorkerLimits,
    WorkerPort,
    WorkerView,
)
from gateway.workers.supervisor.worker import Worker, WorkerHandle
from protocol.failures import Code, Failure
from protocol.spec import WorkerSpec
from protocol.timing_profile import profiles_dir

log = logging.getLogger(__name__)

# A worker that is not adopted gets SIGKILL this long after SIGTERM, whatever the size of its weights.
ORPHAN_GRACE_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class AdoptionRefusal:
    """Reason why a worker is stopped, and whether its model is loaded again."""

    reason: str
    is_loaded_again: bool = False


def adoption_refusal(survivor: Survivor, wanted: WorkerSpec | None) -> AdoptionRefusal | None:
    """Return why a surviving worker does not match its configured specification; None if it can be adopted."""
    spec = survivor.spec
    if wanted is None:
        return AdoptionRefusal("its model is not configured")
    if spec is None:
        return AdoptionRefusal(f"{survivor.reason}, and its model is loaded again", True)
    if spec.group is not None and not is_local(spec.group):
        return AdoptionRefusal("ranks of it on other machines have ended with the gateway before", True)
    return None if loads_alike(spec, wanted) else AdoptionRefusal("its configuration has changed")


async def stop_orphans(processes: Sequence[WorkerPort]) -> None:
    """Stop the workers that are not adopted, and wait for their exits."""
    async with asyncio.TaskGroup() as tasks:
        for process in processes:
            tasks.create_task(_stop(process))


async def _stop(process: WorkerPort) -> None:
    process.signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(ORPHAN_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.signal(signal.SIGKILL)
        await process.wait()
    process.close()


RELEASE_POLL_S = 0.02
# Seconds after which `stop_now` kills workers that have not stopped.
_KILL_S = 2.0
_HANDED_OVER = Failure(Code.DRAINING, "the server is being restarted")


class Pool:
    """Workers of all configured models. `start` must be called first; all methods run on its event loop."""

    def __init__(
        self,
        config: Config,
        link: WorkerLink,
        events: Events,
        *,
        command: Command = default_command,
        limits: WorkerLimits | None = None,
        machine: HostMemory | None = None,
        make_processes: Callable[[Registry], ProcessTable] | None = None,
        disk: Disk = SYSTEM_DISK,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        """`command` starts a worker on this machine. `make_processes` replaces the processes of this machine, for
        example by simulated ones.
        """
        self._config = config
        self._link = link
        self._events = events
        self._limits = limits or WorkerLimits()

        def spawner(registry: Registry) -> ProcessTable:
            return Spawner(config.home, registry, command)

        self._make_processes = make_processes or spawner
        self._disk = disk
        self._clock, self._random = clock, random
        # Workers of removed models stay until they have stopped.
        self._workers: dict[str, Worker] = {}
        self._removed: set[str] = set()
        # Models whose worker of an earlier gateway cannot be adopted: it is stopped at the start, and the model is
        # loaded again.
        self._reloaded: set[str] = set()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self.times = KnownTimes(profiles_dir(config.home))
        self.broker = Broker(
            config, self._workers, link, events, machine or ThisMachine(), self._limits, self.times, clock
        )
        # Called with the name of a worker and its new state.
        self.on_state: Callable[[str, State], None] | None = None
        self._effects: Effects | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._is_started = asyncio.Event()
        self._root: asyncio.Task[None] | None = None
        # Workers of an earlier gateway that are not adopted, and the task that stops them.
        self._unwanted: list[WorkerPort] = []
        self._orphans: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind the link, adopt or stop the workers of an earlier gateway, and begin to preload models.

        The caller must hold the run directory's lock. Adoptions do not wait for the exits of the stopped workers, but
        loads do.
        """
        registry = Registry(self._config.run_dir, self._disk)
        processes = self._make_processes(registry)
        self._effects = Effects(
            self._link,
            self._events,
            self._limits,
            self.broker.admit,
            self._on_state,
            processes.spawn,
            registry.next_epoch,
            self._clock,
            random=self._random,
            stamp=lambda spec: (model_stamp(spec.path), model_stamp(spec.draft) if spec.draft else ()),
        )
        for model in self._config.models.values():
            self._workers[model.name] = self._make(model, self._effects)
        survivors = registry.survivors(processes.mismatch, processes.running())
        self._unwanted = [processes.adopt(survivor) for survivor in survivors if not self._adopt(survivor, processes)]
        self._link.open()
        self._root = asyncio.create_task(self._run())
        await self._is_started.wait()

    def _on_state(self, name: str, state: State) -> None:
        self.broker.on_state(name, state)
        if state is State.LOADING and (model := self._config.models.get(name)) is not None:
            for experiment in experiments_of(self._config.server, model):
                log.info("model %s uses an experimental feature: %s", name, experiment)
            if tells_prompts(model.kv_events):
                log.warning("model %s: kv_events tells prompts to all that connect to %s", name, model.kv_events)
        if self.on_state is not None:
            self.on_state(name, state)

    def _adopt(self, survivor: Survivor, processes: ProcessTable) -> bool:
        """Adopt an earlier gateway's worker. Return False if the worker must be stopped instead."""
        worker, process = self._workers.get(survivor.name), survivor.process
        refused = adoption_refusal(survivor, worker.spec if worker is not None else None)
        if refused is None:
            assert worker is not None
            assert survivor.spec is not None
            log.info("adopting worker %s#%d (pid %d)", worker.name, process.epoch, process.pid)
            self.broker.adopt(worker.name, survivor.spec.memory_bytes)
            worker.adopt(processes.adopt(survivor), process.epoch)
            return True
        if refused.is_loaded_again:
            self._reloaded.add(survivor.name)
        log.info("stopping worker %s#%d (pid %d): %s", survivor.name, process.epoch, process.pid, refused.reason)
        return False

    async def wait(self) -> None:
        """Wait until the pool has stopped. Raises the exception that ended it."""
        assert self._root is not None, "start() comes first"
        await asyncio.wait([self._root])
        if not self._root.cancelled():
            self._root.result()

    async def stop(self, deadline_s: float) -> None:
        """Refuse new requests, let running ones finish until the deadline, then stop all workers gently."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self._workers.values():
                tasks.create_task(worker.stop(deadline_s, is_closing=True))
        if self._root is not None:
            if self._orphans is not None:
                await asyncio.wait([self._orphans])
            self._root.cancel()
            await asyncio.wait([self._root])
        self._link.close()

    async def release(self, deadline_s: float, impatience: asyncio.Task[object]) -> None:
        """Let running requests finish until the deadline, or until the task `impatience` ends. The next gateway adopts
        the workers."""
        end = self._clock() + deadline_s
        while self._link.in_flight and self._clock() < end and not impatience.done():
            await asyncio.wait({impatience}, timeout=RELEASE_POLL_S)
        self._link.abandon(_HANDED_OVER)
        if self._root is not None:
            self._root.cancel()
            await asyncio.wait([self._root])
        # Requests that waited for a worker may have begun on it meanwhile.
        self._link.abandon(_HANDED_OVER)
        self._link.close()

    async def stop_now(self) -> None:
        """Abort running requests, and kill workers that have not stopped after `_KILL_S`. May run during `stop`."""
        kill = asyncio.get_running_loop().call_later(_KILL_S, self._kill)
        try:
            async with asyncio.TaskGroup() as tasks:
                for worker in self._workers.values():
                    tasks.create_task(worker.stop(0.0, is_closing=True))
            if self._orphans is not None:
                await asyncio.wait([self._orphans])
        finally:
            kill.cancel()

    async def ensure_ready(self, model: str) -> WorkerHandle:
        """Return the worker of `model`, waiting until the model is loaded. Raises `ModelUnavailable`."""
        worker = self._configured(model)
        if not worker.is_ready:
            await worker.ensure_ready()
        return worker

    async def fits(self, model: str) -> bool:
        """Whether the model is loaded, or could be without unloading another one."""
        worker = self._workers.get(model)
        return worker is None or worker.is_resident or await self.broker.fits(model)

    def apply(self, config: Config) -> "AppliedConfig":
        """Apply `config`. Workers whose settings changed are restarted, which pauses their streams.

        Running requests of a removed model may finish until the drain's deadline.
        """
        old, self._config = self._config, config
        self.broker.configure(config)
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
        """Return the models whose resident workers `apply` would restart."""
        old = self._config
        kept = [(old.models[name], model) for name, model in config.models.items() if name in old.models]
        changed = (model for before, model in kept if self._loads_otherwise(old, before, config, model))
        return [model.name for model in changed if self._workers[model.name].is_resident]

    async def load(self, model: str) -> None:
        """Load a model, even if earlier loads have failed. Raises `ModelUnavailable`."""
        await self._configured(model).load()

    async def unload(self, model: str) -> None:
        """Let running requests finish, then stop the worker. The next request loads it again."""
        await self._configured(model).stop(self._config.server.drain_s)

    async def restart(self, model: str) -> None:
        """Replace the worker, which pauses its streams. Raises `ModelUnavailable`."""
        await self._configured(model).restart()

    async def pin(self, model: str) -> None:
        """Prevent the eviction of a model until the daemon ends or it is unpinned."""
        self.broker.pin(model, True)

    async def unpin(self, model: str) -> None:
        self.broker.pin(model, False)

    def workers(self) -> list[WorkerView]:
        """Return snapshots of the workers of configured models, in the order of the configuration."""
        return [self._workers[name].view() for name in self._config.models if name in self._workers]

    def worker(self, model: str) -> WorkerHandle:
        """Return the worker of a configured model, in any state."""
        return self._workers[model]

    def handles(self) -> list[WorkerHandle]:
        """Return all workers, including those of removed models that have not stopped."""
        return list(self._workers.values())

    def ready_epoch(self, model: str) -> int:
        """Return the epoch of a model's worker while it is ready, else 0."""
        worker = self._workers.get(model)
        return worker.epoch if worker is not None and worker.state is State.READY else 0

    def load_left_s(self, model: str) -> float:
        """Estimate the seconds until a model is ready, from how long its newest loads took. Returns 0 if it is ready or
        was never loaded.
        """
        worker = self._workers.get(model)
        if worker is None or worker.state is State.READY:
            return 0.0
        view = worker.view()
        load_s = self.times.load_s(model, view.path)
        return max(0.0, load_s - view.since_s) if view.state is State.LOADING else load_s

    def find(self, model: str) -> WorkerHandle | None:
        """Return the worker of a model, or None if it is not configured."""
        return self._workers.get(model)

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for worker in self._workers.values():
                self._runs[worker.name] = tasks.create_task(worker.run())
            # The link shuts down unknown workers, so adopted ones must be attached before it runs.
            tasks.create_task(self._link.run())
            self._orphans = tasks.create_task(stop_orphans(self._unwanted))
            tasks.create_task(self._grant_memory(self._orphans))
            tasks.create_task(MemoryWatch(self.broker, self._events, self._limits).run())
            # Pinned models are loaded first, and otherwise in the order of the configuration.
            for worker in sorted(self._workers.values(), key=lambda worker: not self.broker.is_pinned(worker.name)):
                if worker.is_preload or worker.name in self._reloaded:
                    tasks.create_task(_preload(worker))
            self._is_started.set()

    # -- changes of the configuration --------------------------------------------------------------------------------

    def _configured(self, model: str) -> WorkerHandle:
        """Return the worker of a configured model. Raises `ModelUnavailable` if the model was removed meanwhile."""
        if model in self._removed or model not in self._workers:
            raise ModelUnavailable(_removed_failure(model))
        return self._workers[model]

    def _add(self, model: ModelConfig) -> None:
        worker = self._workers.get(model.name)
        if worker is not None:
            # A removed model was added again before its worker stopped: two workers of one name must not run.
            self._removed.discard(model.name)
            worker.change(self._spec(model), is_preload=model.preload, is_reload=True)
        else:
            assert self._effects is not None, "start() comes first"
            worker = self._workers[model.name] = self._make(model, self._effects)
            self._runs[model.name] = self._run_task(worker.run())
        if model.preload:
            self._run_task(_preload(worker))

    def _change(self, old: Config, before: ModelConfig, model: ModelConfig) -> bool:
        """Apply changed settings to a worker. Return whether it is resident and restarted."""
        worker, spec = self._workers[model.name], self._spec(model)
        is_other = self._loads_otherwise(old, before, self._config, model)
        worker.change(spec, is_preload=model.preload, is_reload=is_other)
        if model.preload and not before.preload:
            self._run_task(_preload(worker))
        return is_other and worker.is_resident

    def _loads_otherwise(self, old: Config, before: ModelConfig, config: Config, model: ModelConfig) -> bool:
        """Whether the model's process must be replaced to apply `config`."""
        return before.cache != model.cache or not loads_alike(self._spec(before, old), self._spec(model, config))

    async def _retire(self, worker: Worker) -> None:
        name = worker.name
        if name not in self._removed:
            return
        await worker.stop(self._config.server.drain_s, reason=_removed_failure(name))
        # While the worker was stopped, the model may have been added again, and even removed a second time.
        if name in self._removed and self._workers.get(name) is worker:
            self._removed.discard(name)
            del self._workers[name]
            self._runs.pop(name).cancel()
            self._events.model_removed(name)

    def _run_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        assert self._tasks is not None, "start() comes first"
        return self._tasks.create_task(work)

    def _make(self, model: ModelConfig, effects: Effects) -> Worker:
        return Worker(self._spec(model), effects, is_preload=model.preload)

    async def _grant_memory(self, orphans: asyncio.Task[None]) -> None:
        """Start to grant memory after the unwanted workers of an earlier gateway have exited."""
        await orphans
        await self.broker.run()

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        for process in self._unwanted:
            process.signal(signal.SIGKILL)

    def _spec(self, model: ModelConfig, config: Config | None = None) -> WorkerSpec:
        return worker_spec(config or self._config, model, self._link.down, self._link.up)


@dataclass(frozen=True, slots=True)
class AppliedConfig:
    """The models that a new configuration added, removed and restarted."""

    added: list[str]
    removed: list[str]
    restarted: list[str]


def _removed_failure(model: str) -> Failure:
    return Failure(Code.MODEL_MISSING, f"model '{model}' was removed from the configuration")


async def _preload(worker: WorkerHandle) -> None:
    try:
        await worker.ensure_ready()
    except ModelUnavailable as error:
        log.error("model %s was not preloaded: %s", worker.name, error)
