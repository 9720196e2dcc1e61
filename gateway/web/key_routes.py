"""API keys on the page: list, create, rotate, revoke. Admin keys are changed by the command line only."""

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.access.key import Key
from gateway.access.key_file import KeyFile, KeyRefused
from gateway.control.command_body import read_order
from gateway.errors import BadRequest, Forbidden
from gateway.failed import CommandFailed
from gateway.http.exchange import send_body
from gateway.request.record import record_of
from gateway.services import Services
from gateway.web.entrance import session_of
from gateway.web.schemas import KeyFields, KeyList, KeyOrder, KeyRef, KeyRevoked, KeySecret, KeyView

T = TypeVar("T")

_encode: Final = msgspec.json.Encoder().encode
_order: Final = msgspec.json.Decoder(KeyOrder)
_ref: Final = msgspec.json.Decoder(KeyRef)


def routes(services: Services, prefix: str) -> list[Route]:
    """Return all routes."""
    keys = Keys(services)
    return [
        Route(f"{prefix}/keys", keys.list, methods=["GET"]),
        Route(f"{prefix}/keys/create", keys.create, methods=["POST"]),
        Route(f"{prefix}/keys/rotate", keys.rotate, methods=["POST"]),
        Route(f"{prefix}/keys/revoke", keys.revoke, methods=["POST"]),
    ]


class Keys:
    """ASGI endpoints on the key file, which is read and changed in a thread because locks and disks block."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.list = _Endpoint(self._list)
        self.create = _Endpoint(self._create)
        self.rotate = _Endpoint(self._rotate)
        self.revoke = _Endpoint(self._revoke)

    async def _list(self, scope: Scope, receive: Receive, send: Send) -> None:
        keyring = self._services.keyring
        keyring.refresh()
        keys = await _carry_out(self._file(scope).read)
        await send_body(send, 200, _encode(KeyList([self._view(key) for key in keys], keyring.is_open)))

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = await read_order(scope, receive, _order)
        limits = {name: getattr(order, name) for name in KeyFields.__struct_fields__}
        wanted = Key(name=order.name, prefix="", salt="", hash="", is_metrics_only=order.role == "metrics", **limits)
        file = self._file(scope)
        key, secret = await _carry_out(lambda: file.create(wanted, shares_cache=order.shares_cache))
        await send_body(send, 200, _encode(KeySecret(self._view(key), secret)))

    async def _rotate(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, file = (await read_order(scope, receive, _ref)).name, self._file(scope)

        def rotate() -> tuple[Key, str]:
            _refuse_admin(file, name)
            return file.rotate(name)

        key, secret = await _carry_out(rotate)
        await send_body(send, 200, _encode(KeySecret(self._view(key), secret)))

    async def _revoke(self, scope: Scope, receive: Receive, send: Send) -> None:
        name, file = (await read_order(scope, receive, _ref)).name, self._file(scope)

        def revoke() -> int:
            _refuse_admin(file, name)
            return file.revoke(name)

        left = await _carry_out(revoke)
        await send_body(send, 200, _encode(KeyRevoked(name, left)))

    def _file(self, scope: Scope) -> KeyFile:
        """Return the key file, which records its changes in the audit log as this visitor's."""
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


class _Endpoint:
    """A method as an ASGI app; Starlette would call a bare one with a request."""

    def __init__(self, app: Callable[[Scope, Receive, Send], object]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)  # type: ignore[misc]


def _refuse_admin(file: KeyFile, name: str) -> None:
    """Raises `Forbidden` for an admin key."""
    if any(key.name == name and key.is_admin for key in file.read()):
        raise Forbidden(f"{name} is an admin key: change it with 'mlxctl keys' on the machine itself.")


async def _carry_out(action: Callable[[], T]) -> T:
    """Run an action in a thread. Raises `BadRequest` with the key file's error."""
    try:
        return await asyncio.to_thread(action)
    except KeyRefused as error:
        raise BadRequest(str(error), code="key_refused") from None
    except CommandFailed as error:
        raise BadRequest(str(error), code="keys_unusable") from None
