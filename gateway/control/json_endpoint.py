"""Endpoints that answer with a struct as JSON."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.http.exchange import send_body

# A handler returns the answer to a request, or raises `ApiError`.
JsonHandler = Callable[[Scope, Receive], Awaitable[msgspec.Struct]]


class JsonEndpoint:
    """ASGI app of one handler. It is an object, because starlette would call a function with a `Request` instead."""

    def __init__(self, handler: JsonHandler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, msgspec.json.encode(await self._handler(scope, receive)))


def get(path: str, handler: JsonHandler) -> Route:
    return Route(path, JsonEndpoint(handler), methods=["GET"])


def post(path: str, handler: JsonHandler) -> Route:
    return Route(path, JsonEndpoint(handler), methods=["POST"])
