"""Batches for the unix socket: list and cancel."""

from typing import Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope

from gateway.api.batches.batches import Batches
from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.control.json_endpoint import get, post
from gateway.control_types import BatchViews, CancelResult, RequestRef
from gateway.errors import ApiError

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
