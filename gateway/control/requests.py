"""Requests that are served, and captured ones, for the unix socket and the page: list, show, cancel, clear."""

import msgspec
from starlette.datastructures import QueryParams
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.control_types import CancelResult, ClearedCaptures, RequestDetail, RequestList, RequestRef
from gateway.errors import ApiError
from gateway.http.exchange import send_body
from gateway.services import Services

_ref = msgspec.json.Decoder(RequestRef)


def routes(services: Services, prefix: str = "/v1") -> list[Route]:
    """All of them."""
    return [
        Route(f"{prefix}/requests", ListRequests(services), methods=["GET"]),
        Route(f"{prefix}/requests/cancel", CancelRequest(services), methods=["POST"]),
        Route(f"{prefix}/requests/clear", ClearCaptured(services), methods=["POST"]),
        Route(f"{prefix}/requests/{{id}}", RequestDetails(services), methods=["GET"]),
    ]


class ListRequests:
    """`GET /v1/requests`, with `?captured=1` for the captured ones as well."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wants_captured = QueryParams(scope["query_string"]).get("captured") == "1"
        captured = await self._services.captures.lines() if wants_captured else []
        listed = RequestList(self._services.requests.views(), captured)
        await send_body(send, 200, msgspec.json.encode(listed))


class RequestDetails:
    """`GET /v1/requests/ID`: one that is served, and the newest captured one of this id."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, name = self._services, scope["path_params"]["id"]
        detail = RequestDetail(services.requests.view(name), await services.captures.find(name))
        if detail.live is None and detail.captured is None:
            hint = "" if services.captures.is_on else "; to keep those that have ended, set [server] capture"
            raise _unknown(name, hint)
        if detail.captured is not None:
            note(scope, Command("capture.read", name[:200]))
        await send_body(send, 200, msgspec.json.encode(detail))


class CancelRequest:
    """`POST /v1/requests/cancel` with `{"id": ID}`. Its client gets an error in its own dialect."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = (await read_order(scope, receive, _ref, 'The body must be {"id": ID}')).id
        note(scope, Command("request.cancel", name[:200]))
        if not self._services.requests.cancel(name):
            raise _unknown(name)
        await send_body(send, 200, msgspec.json.encode(CancelResult(name)))


class ClearCaptured:
    """`POST /v1/requests/clear`: delete every captured request."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = note(scope, Command("capture.clear"))
        cleared = ClearedCaptures(await self._services.captures.clear())
        order.facts = msgspec.to_builtins(cleared)
        await send_body(send, 200, msgspec.json.encode(cleared))


def _unknown(name: str, hint: str = "") -> ApiError:
    return ApiError(404, f"There is no request {name[:200]!r}{hint}.", code="request_not_found")
