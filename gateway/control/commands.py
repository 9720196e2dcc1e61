"""Commands of the operator, over the unix socket or from the web page, and their lines in the audit log.

Peer credentials of a unix socket: the user and the process at its other end, reported by the kernel.

Bodies of commands on the control socket and the web page.

Endpoints that answer with a struct as JSON.
"""

import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.audit_log import Action, AuditActor, AuditTrail, Fact, entry
from gateway.errors import ApiError, BadRequest
from gateway.http.bodies import read_body, send_body
from gateway.http.direct_write import writer_of
from gateway.request.record import record_of
from gateway.workers.pool import Pool
from protocol.codec import UNREADABLE

# struct ucred of Linux: pid, uid, gid.
_UCRED: Final = struct.Struct("=iII")
# macOS's struct xucred begins with its version, which is 0, and the uid. The option numbers are from `sys/un.h`.
_XUCRED: Final = struct.Struct("=II")
_XUCRED_BYTES: Final = 76
_SOL_LOCAL: Final = 0
_LOCAL_PEERCRED: Final = 0x001
_LOCAL_PEERPID: Final = 0x002
_PID: Final = struct.Struct("=i")


def peer_of(connection: socket.socket) -> AuditActor:
    """Return the process at the other end of the socket. Fields that the system does not report are left out."""
    try:
        if sys.platform == "linux":
            return from_ucred(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        if sys.platform == "darwin":
            credentials = connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERCRED, _XUCRED_BYTES)
            return from_xucred(credentials, connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, _PID.size))
    except OSError:
        pass  # The client has disconnected, so nothing more is known.
    return AuditActor()


def from_ucred(credentials: bytes) -> AuditActor:
    """Parse the credentials that Linux reports."""
    pid, uid, _ = _UCRED.unpack(credentials)
    return AuditActor(uid=uid, pid=pid)


def from_xucred(credentials: bytes, pid: bytes) -> AuditActor:
    """Parse the credentials that macOS reports, and add the pid."""
    version, uid = _XUCRED.unpack_from(credentials)
    return AuditActor(uid=uid if version == 0 else None, pid=_PID.unpack(pid)[0])


T = TypeVar("T")

BODY_BYTES_MAX: Final = 64 * 1024


async def read_order(
    scope: Scope, receive: Receive, decoder: "msgspec.json.Decoder[T]", expected: str = "The body cannot be read"
) -> T:
    """Decode the body of a command. Raises `BadRequest` with the error and what was expected."""
    body = await read_body(scope, receive, BODY_BYTES_MAX)
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise BadRequest(f"{expected}: {error}.") from None


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


ModelVerb = Literal["load", "unload", "restart", "pin", "unpin"]
# A verb, its name in the audit log, and the function that carries it out for a model.
ModelCommand = tuple[ModelVerb, Action, Callable[[str], Awaitable[None]]]

_SCOPE_KEY: Final = "mlxd.command"


def model_commands(pool: Pool) -> tuple[ModelCommand, ...]:
    """Return the commands to a model, which the unix socket and the web page offer."""
    return (
        ("load", "model.load", pool.load),
        ("unload", "model.unload", pool.unload),
        ("restart", "model.restart", pool.restart),
        ("pin", "model.pin", pool.pin),
        ("unpin", "model.unpin", pool.unpin),
    )


@dataclass(slots=True)
class Command:
    """Command of a request. Its endpoint notes the command before carrying it out, and may add `facts` afterwards."""

    action: Action
    target: str = ""
    facts: Mapping[str, Fact] = field(default_factory=dict[str, Fact])


class AuditedCommand:
    """ASGI middleware that records each command with its outcome and its sender.

    The sender is the process at the other end of the unix socket or, over TCP, a `session` of the page.
    """

    def __init__(self, app: ASGIApp, trail: AuditTrail, session: Callable[[Scope], str] | None = None) -> None:
        self._app = app
        self._trail = trail
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = writer_of(scope)
        # The credentials are read first, because a client may disconnect while its command is carried out.
        actor = AuditActor() if writer is None or self._session is not None else peer_of(writer.socket)
        outcome = "interrupted"
        try:
            await self._app(scope, receive, send)
            outcome = "ok"
        except ApiError as error:
            outcome = error.outcome
            raise
        finally:
            command: Command | None = scope.get(_SCOPE_KEY)
            if command is not None:
                client = str(record_of(scope).client)
                facts = dict(command.facts)
                if self._session is not None:
                    facts["session"] = self._session(scope)
                self._trail.record(
                    entry(command.action, command.target, outcome=outcome, client=client, actor=actor, facts=facts)
                )


def note(scope: Scope, command: Command) -> Command:
    """Set the command of a request, for the audit log."""
    scope[_SCOPE_KEY] = command
    return command
