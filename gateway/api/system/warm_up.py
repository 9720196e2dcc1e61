"""Prefill of a model's warm prompts after each load, so that the first requests find their prefixes cached.

As a probe, a warm prompt counts in no admission queue, key or metric of requests, and keeps no model loaded.
"""

import asyncio
import logging
from typing import Final

from msgspec.structs import replace

from gateway.api.openai.warm_prompts import UnusableWarmPrompt, read_warm_prompt
from gateway.link.transport import WorkerGone
from gateway.services import Services
from gateway.workers.supervisor.state import State
from gateway.workers.supervisor.worker import WorkerHandle
from protocol.codec import Unsendable
from protocol.from_worker import Delta
from protocol.to_worker import Generate

log = logging.getLogger(__name__)

POLL_S: Final = 0.05
# States that a ready worker enters by a command, or in which it stays.
_COMMANDED: Final = frozenset({State.READY, State.DRAINING, State.STOPPING})


class WarmUp:
    """Tasks that prefill the warm prompts of loaded models, one prompt at a time, after the requests of clients."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._running: dict[str, asyncio.Task[None]] = {}
        # The file that is prefilled now, by model.
        self._file: dict[str, str] = {}
        # Models and files during whose prefill a worker was lost. They are not tried again, so that no file can crash
        # each new worker.
        self._suspected: set[tuple[str, str]] = set()

    @property
    def is_busy(self) -> bool:
        return any(not task.done() for task in self._running.values())

    def on_state(self, name: str, state: State) -> None:
        """Begin when a model is ready. A worker that leaves this state must not wait for its warm prompts."""
        if name in self._file and state not in _COMMANDED:
            log.warning("model %s: its worker was lost while it prefilled %s", name, self._file[name])
            self._suspected.add((name, self._file[name]))
        self._cancel(name)
        services = self._services
        model = services.config.models.get(name)
        if state is State.READY and model is not None and model.warm and not services.admission.is_draining:
            self._running[name] = services.tasks.start(self._run(name, model.warm), f"the warm prompts of {name}")

    def stop(self) -> None:
        """Give up all warm prompts."""
        for name in list(self._running):
            self._cancel(name)

    def _cancel(self, name: str) -> None:
        if (task := self._running.pop(name, None)) is not None:
            task.cancel()

    async def _run(self, name: str, files: tuple[str, ...]) -> None:
        services = self._services
        worker = services.pool.worker(name)
        for file in files:
            if (name, file) in self._suspected:
                continue
            model = services.config.models.get(name)
            if model is None:
                return
            while not worker.is_ready:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(POLL_S)
            self._file[name] = file
            try:
                size_max = services.config.server.max_body_bytes
                generate = await asyncio.to_thread(read_warm_prompt, file, model, size_max)
                end = await self._prefill(worker, generate)
            except (UnusableWarmPrompt, Unsendable) as error:
                log.warning("model %s: warm prompt not prefilled: %s", name, error)
                continue
            except WorkerGone:
                return
            finally:
                self._file.pop(name, None)
            if end.failure is not None or end.usage is None:
                why = end.failure.message if end.failure is not None else "it was aborted"
                log.warning("model %s: warm prompt %s not prefilled: %s", name, file, why)
            else:
                log.info("model %s: %s is cached: %d tokens", name, file, end.usage.prompt)

    async def _prefill(self, worker: WorkerHandle, generate: Generate) -> Delta:
        """Return the last delta. Raises `Unsendable` and `WorkerGone`."""
        link = self._services.link
        collector = link.submit(worker, [replace(generate, rid=link.next_rid())])
        try:
            while True:
                for delta in await collector.read_deltas():
                    if delta.finish is not None:
                        return delta
        finally:
            link.abort(collector.rids, "warm prompt")
