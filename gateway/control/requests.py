"""Running and captured requests, for the unix socket and the page: list, show, cancel, clear."""

import msgspec
from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import Receive, Scope

from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.control.json_endpoint import get, post
from gateway.control_types import CancelResult, ClearedCaptures, RequestDetail, RequestList, RequestRef, RequestWhy
from gateway.errors import ApiError
from gateway.request.why import explain
from gateway.services import Services

_ref = msgspec.json.Decoder(RequestRef)


def routes(services: Services, prefix: str = "/v1") -> list[Route]:
    endpoints = _RequestEndpoints(services)
    return [
        get(f"{prefix}/requests", endpoints.list),
        post(f"{prefix}/requests/cancel", endpoints.cancel),
        post(f"{prefix}/requests/clear", endpoints.clear),
        get(f"{prefix}/requests/{{id}}", endpoints.show),
        get(f"{prefix}/requests/{{id}}/why", endpoints.why),
    ]


class _RequestEndpoints:
    def __init__(self, services: Services) -> None:
        self._requests = services.requests
        self._captures = services.captures
        self._services = services

    async def list(self, scope: Scope, receive: Receive) -> RequestList:
        """`GET /v1/requests`, with `?captured=1` for captured requests as well."""
        wants_captured = QueryParams(scope["query_string"]).get("captured") == "1"
        captured = await self._captures.lines() if wants_captured else []
        return RequestList(self._requests.views(), captured)

    async def show(self, scope: Scope, receive: Receive) -> RequestDetail:
        """`GET /v1/requests/ID`: the running request and the newest captured one of this id."""
        name = scope["path_params"]["id"]
        detail = RequestDetail(self._requests.view(name), await self._captures.find(name))
        if detail.live is None and detail.captured is None:
            hint = "" if self._captures.is_on else "; to keep those that have ended, set [server] capture"
            raise _unknown(name, hint)
        if detail.captured is not None:
            note(scope, Command("capture.read", name[:200]))
        return detail

    async def why(self, scope: Scope, receive: Receive) -> RequestWhy:
        """`GET /v1/requests/ID/why`: the causes of the time of a request that has ended, by its id or its answer's."""
        name = scope["path_params"]["id"]
        request = self._services.recent.find(name)
        if request is None:
            hint = " among the newest that have ended"
            raise _unknown(name, "; it still runs" if self._requests.view(name) is not None else hint)
        # A request without a key is the owner's own.
        return await explain(self._services, request, shows_text=request.key is None)

    async def cancel(self, scope: Scope, receive: Receive) -> CancelResult:
        """`POST /v1/requests/cancel` with `{"id": ID}`. The client gets an error in its own dialect."""
        name = (await read_order(scope, receive, _ref, 'The body must be {"id": ID}')).id
        note(scope, Command("request.cancel", name[:200]))
        if not self._requests.cancel(name):
            raise _unknown(name)
        return CancelResult(name)

    async def clear(self, scope: Scope, receive: Receive) -> ClearedCaptures:
        """`POST /v1/requests/clear`: delete every captured request."""
        command = note(scope, Command("capture.clear"))
        cleared = ClearedCaptures(await self._captures.clear())
        command.facts = msgspec.to_builtins(cleared)
        return cleared


def _unknown(name: str, hint: str = "") -> ApiError:
    return ApiError(404, f"There is no request {name[:200]!r}{hint}.", code="request_not_found")
