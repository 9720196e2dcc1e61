"""API keys on the web page: list, create, rotate, revoke. Only the command line changes admin keys."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from gateway.access.key import Key
from gateway.access.key_file import KeyFile, KeyRefused
from gateway.control.command_body import read_order
from gateway.errors import BadRequest, Forbidden
from gateway.failed import CommandFailed
from gateway.http.exchange import json_response
from gateway.request.record import record_of
from gateway.services import Services
from gateway.web.entrance import session_of
from gateway.web.schemas import KeyFields, KeyList, KeyOrder, KeyRef, KeyRevoked, KeySecret, KeyView

T = TypeVar("T")

_order: Final = msgspec.json.Decoder(KeyOrder)
_ref: Final = msgspec.json.Decoder(KeyRef)


class Keys:
    """Endpoints for the key file. A thread reads and changes the file, because locks and disks block."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def routes(self, prefix: str) -> list[Route]:
        return [
            Route(f"{prefix}/keys", self._list, methods=["GET"]),
            Route(f"{prefix}/keys/create", self._create, methods=["POST"]),
            Route(f"{prefix}/keys/rotate", self._rotate, methods=["POST"]),
            Route(f"{prefix}/keys/revoke", self._revoke, methods=["POST"]),
        ]

    async def _list(self, request: Request) -> Response:
        keyring = self._services.keyring
        keyring.refresh()
        keys = await _carry_out(self._file(request.scope).read)
        return json_response(KeyList([self._view(key) for key in keys], keyring.is_open))

    async def _create(self, request: Request) -> Response:
        order = await read_order(request.scope, request.receive, _order)
        limits = {name: getattr(order, name) for name in KeyFields.__struct_fields__}
        wanted = Key(name=order.name, prefix="", salt="", hash="", is_metrics_only=order.role == "metrics", **limits)
        file = self._file(request.scope)
        key, secret = await _carry_out(lambda: file.create(wanted, shares_cache=order.shares_cache))
        return json_response(KeySecret(self._view(key), secret))

    async def _rotate(self, request: Request) -> Response:
        key, secret = await self._change(request, KeyFile.rotate)
        return json_response(KeySecret(self._view(key), secret))

    async def _revoke(self, request: Request) -> Response:
        name, left = await self._change(request, lambda file, name: (name, file.revoke(name)))
        return json_response(KeyRevoked(name, left))

    async def _change(self, request: Request, action: Callable[[KeyFile, str], T]) -> T:
        """Change the key that the request names. Raises `Forbidden` for an admin key."""
        name, file = (await read_order(request.scope, request.receive, _ref)).name, self._file(request.scope)

        def change() -> T:
            if any(key.name == name and key.is_admin for key in file.read()):
                raise Forbidden(f"{name} is an admin key: change it with 'mlxctl keys' on the machine itself.")
            return action(file, name)

        return await _carry_out(change)

    def _file(self, scope: Scope) -> KeyFile:
        """Return the key file. It records changes in the audit log as made by this visitor."""
        return KeyFile(self._services.config.keys_path, client=f"ui {session_of(scope).id} {record_of(scope).client}")

    def _view(self, key: Key) -> KeyView:
        numbers = self._services.metrics.keys.get(key.name)
        fields = {name: getattr(key, name) for name in KeyFields.__struct_fields__}
        return KeyView(
            name=key.name,
            prefix=key.prefix,
            role=key.role,
            is_disabled=key.is_disabled,
            shares_cache=not key.cache_salt,
            created=key.created,
            last_used=numbers.last_used if numbers else 0.0,
            requests=sum(numbers.requests.values()) if numbers else 0,
            prompt_tokens=numbers.prompt_tokens if numbers else 0,
            completion_tokens=numbers.generation_tokens if numbers else 0,
            running=numbers.running if numbers else 0,
            rejections=dict(numbers.rejections) if numbers else {},
            **fields,
        )


async def _carry_out(action: Callable[[], T]) -> T:
    """Run an action in a thread. Raises `BadRequest` with the key file's error."""
    try:
        return await asyncio.to_thread(action)
    except KeyRefused as error:
        raise BadRequest(str(error), code="key_refused") from None
    except CommandFailed as error:
        raise BadRequest(str(error), code="keys_unusable") from None
