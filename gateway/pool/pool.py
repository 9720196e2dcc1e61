"""Which models run."""

import asyncio
import logging
import random
import signal
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec

from gateway.config import Config, ModelConfig
from gateway.link import Link
from gateway.pool.effects import Process
from gateway.pool.leftovers import Ledger, Record
from gateway.pool.process import Worker
from gateway.pool.spawn import Command, Spawner, default_command
from gateway.pool.state import Events, Limits, ModelUnavailable, WorkerView
from protocol.failures import Code, Failure
from protocol.messages import WorkerSpec

log = logging.getLogger(__name__)

# What a leftover that nobody wants any more gets between SIGTERM and SIGKILL: its weights are unknown.
LEFTOVER_GRACE_S = 30.0
RELEASE_POLL_S = 0.02
_HANDED_OVER = Failure(Code.DRAINING, "the server is being restarted")


class Pool:
    """The workers of all configured models. `start` comes first; every method belongs to its event loop."""

    def __init__(
        self,
        config: Config,
        link: Link,
        events: Events,
        *,
        command: Command = default_command,
        limits: Limits | None = None,
    ) -> None:
        self._config = config
        self._link = link
        self._events = events
        self._limits = limits or Limits()
        self._command = command
        self._workers: dict[str, Worker] = {}
        self._is_cleared = asyncio.Event()
        self._is_started = asyncio.Event()
        self._root: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Bind the link, adopt or stop what an earlier gateway left, and begin the preloads.

        The run directory's lock must be held. Loads wait until unwanted leftovers are gone; adoption does not.
        """
        ledger = Ledger(self._config.run_dir)
        spawner = Spawner(self._config.home, ledger, self._command)
        effects = _RealEffects(ledger, spawner, self._is_cleared)
        for model in self._config.models.values():
            self._workers[model.name] = Worker(
                self._spec(model),
                effects=effects,
                wire=self._link,
                events=self._events,
                limits=self._limits,
                load_timeout_s=model.load_timeout_s,
                is_preload=model.preload,
            )
        unwanted: list[Process] = []
        for record in ledger.survivors():
            worker = self._workers.get(record.spec.name)
            if worker is not None and _is_same(record, worker.spec):
                log.info("adopting worker %s#%d (pid %d)", record.spec.name, record.epoch, record.pid)
                worker.adopt(spawner.adopt(record), record.epoch)
            else:
                log.info("stopping worker %s#%d (pid %d): not wanted", record.spec.name, record.epoch, record.pid)
                unwanted.append(spawner.adopt(record))
        self._link.open()
        self._root = asyncio.create_task(self._run(unwanted))
        await self._is_started.wait()

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

    async def ensure_ready(self, model: str) -> Worker:
        """The worker of `model`, loaded. Without a task switch when it is. Raises `ModelUnavailable`."""
        worker = self._workers[model]
        if not worker.is_ready:
            await worker.ensure_ready()
        return worker

    def busy(self, model: str) -> "Lease":
        """Hold the model from before `ensure_ready` to the end of the request."""
        return Lease(self._workers[model])

    async def load(self, model: str) -> None:
        """Load now, also after failures. Raises `ModelUnavailable`."""
        await self._workers[model].load()

    async def unload(self, model: str) -> None:
        """Finish what runs, then stop the worker. The next request loads it again."""
        await self._workers[model].stop(self._config.server.drain_s)

    async def restart(self, model: str) -> None:
        """Stop and start; what runs pauses meanwhile. Raises `ModelUnavailable`."""
        await self._workers[model].restart()

    def workers(self) -> list[WorkerView]:
        return [worker.view() for worker in self._workers.values()]

    def worker(self, model: str) -> Worker:
        """The worker of a configured model, in whatever state it is."""
        return self._workers[model]

    async def _run(self, unwanted: Sequence[Process]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._link.run())
            for worker in self._workers.values():
                tasks.create_task(worker.run())
            tasks.create_task(self._clear(unwanted))
            for worker in self._workers.values():
                if worker.is_preload:
                    tasks.create_task(_preload(worker))
            self._is_started.set()

    async def _clear(self, unwanted: Sequence[Process]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for process in unwanted:
                tasks.create_task(_stop_leftover(process))
        self._is_cleared.set()

    def _kill(self) -> None:
        for worker in self._workers.values():
            worker.kill()

    def _spec(self, model: ModelConfig) -> WorkerSpec:
        has_disk = model.cache.disk_bytes > 0 and model.cache.ram_bytes != 0
        return WorkerSpec(
            name=model.name,
            path=model.path,
            epoch=0,
            down=self._link.down,
            up=self._link.up,
            dtype=model.dtype,
            context=model.context,
            max_running=model.max_running,
            # Admission is the bound; a successor is handed at once all that ran and waited.
            max_waiting=model.max_waiting + model.max_running,
            prefill_chunk=model.prefill_chunk,
            trust_remote_code=model.trust_remote_code,
            log_level=model.log_level or self._config.server.log_level,
            parser=model.parser,
            chat_template=model.chat_template,
            cache_bytes=-1 if model.cache.ram_bytes is None else model.cache.ram_bytes,
            kv_bytes=-1 if model.kv_bytes is None else model.kv_bytes,
            disk_cache_dir=str(self._config.prefix_cache_dir) if has_disk else "",
            disk_cache_bytes=self._config.prefix_cache_bytes if has_disk else 0,
        )


class Lease:
    """A request's hold on a model: while one exists, the model is busy."""

    __slots__ = ("_worker",)

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __enter__(self) -> Self:
        self._worker.leases += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._worker.leases -= 1


class _RealEffects:
    """The real clock, chance and processes."""

    def __init__(self, ledger: Ledger, spawner: Spawner, is_cleared: asyncio.Event) -> None:
        self._ledger = ledger
        self._spawner = spawner
        self._is_cleared = is_cleared

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, s: float) -> None:
        await asyncio.sleep(s)

    def random(self) -> float:
        return random.random()

    def next_epoch(self) -> int:
        return self._ledger.next_epoch()

    async def admit(self, spec: WorkerSpec) -> None:
        """Leftovers may still hold the memory that this worker needs."""
        await self._is_cleared.wait()

    def spawn(self, spec: WorkerSpec) -> Process:
        return self._spawner.spawn(spec)


def _is_same(record: Record, spec: WorkerSpec) -> bool:
    return msgspec.structs.replace(record.spec, epoch=0) == spec


async def _preload(worker: Worker) -> None:
    try:
        await worker.ensure_ready()
    except ModelUnavailable as error:
        log.error("model %s was not preloaded: %s", worker.name, error)


async def _stop_leftover(process: Process) -> None:
    process.signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(LEFTOVER_GRACE_S):
            await process.wait()
    except TimeoutError:
        process.signal(signal.SIGKILL)
        await process.wait()
    process.close()
