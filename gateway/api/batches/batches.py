"""The batch APIs of one daemon: their endpoints, store and runner.

Batches for the unix socket: list and cancel.
"""

import time
from collections.abc import Callable
from typing import Final

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope

from gateway.api.batches.batch_lines import StoredBatch
from gateway.api.batches.batch_runner import BatchRunner
from gateway.api.batches.batch_store import BatchStore
from gateway.api.batches.files import FileEndpoints
from gateway.api.batches.openai_and_message_batches import MessageBatches, OpenAIBatches
from gateway.config.settings import Config
from gateway.control.commands import Command, get, note, post, read_order
from gateway.control_types import BatchView, BatchViews, CancelResult, RequestRef
from gateway.disk_and_clock import SYSTEM_DISK, Disk, MakeThread, single_thread
from gateway.errors import ApiError
from gateway.services import Services


class Batches:
    """Files and batches of all keys."""

    def __init__(
        self,
        services: Services,
        config: Config,
        wall: Callable[[], float] = time.time,
        make_thread: MakeThread = single_thread,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        keyring = services.keyring
        self._store = store = BatchStore(
            config.batches_dir, lambda: services.config.batches, lambda: keyring.has_others, make_thread, disk
        )
        self._wall = wall
        self._runner = runner = BatchRunner(services, store, services.batch_gate, wall)
        self.files = FileEndpoints(store, runner.wake, wall)
        self.openai = OpenAIBatches(services, store, runner, wall)
        self.anthropic = MessageBatches(services, store, runner, wall)

    async def start(self, app: ASGIApp) -> None:
        """Continue the batches of an earlier daemon. Their requests go to `app`."""
        self._runner.app = app
        await self._store.load()
        for batch in self._store.batches.values():
            if not batch.has_ended:
                self._runner.add(batch)
        if self._store.files or self._store.batches:
            self._runner.wake()

    def leave(self) -> None:
        """Leave all batches to the next daemon."""
        self._runner.leave()

    def close(self) -> None:
        """Finish all writes."""
        self._store.close()

    # -- for the operator --------------------------------------------------------------------------------------------

    def views(self) -> list[BatchView]:
        """Return the batches of all keys, the oldest first."""
        return [self._view(self._runner.view(batch)) for batch in self._store.batches.values()]

    async def cancel(self, batch_id: str) -> bool:
        """Cancel a batch of any key. Returns False if there is none with this id that has not ended."""
        batch = self._store.batches.get(batch_id)
        if batch is None or batch.has_ended:
            return False
        await self._runner.cancel(batch)
        return True

    def _view(self, batch: StoredBatch) -> BatchView:
        counts = batch.counts
        return BatchView(
            id=batch.id,
            key=batch.key,
            model=batch.model or "",
            endpoint=batch.endpoint,
            state=batch.status,
            total=batch.total,
            succeeded=counts.get("succeeded", 0),
            failed=sum(counts.values()) - counts.get("succeeded", 0),
            age_s=round(self._wall() - batch.created, 1),
            expires_in_s=round(batch.expires - self._wall(), 1),
        )


_ref: Final = msgspec.json.Decoder(RequestRef)


def routes(batches: Batches) -> list[Route]:
    endpoints = _BatchControl(batches)
    return [get("/v1/batches", endpoints.list), post("/v1/batches/cancel", endpoints.cancel)]


class _BatchControl:
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    async def list(self, scope: Scope, receive: Receive) -> BatchViews:
        """`GET /v1/batches`: the batches of all keys."""
        return BatchViews(self._batches.views())

    async def cancel(self, scope: Scope, receive: Receive) -> CancelResult:
        """`POST /v1/batches/cancel` with `{"id": ID}`."""
        name = (await read_order(scope, receive, _ref, 'The body must be {"id": ID}')).id
        note(scope, Command("batch.cancel", name[:200]))
        if not await self._batches.cancel(name):
            raise ApiError(404, f"There is no batch {name[:200]!r} that has not ended.", code="batch_not_found")
        return CancelResult(name)
