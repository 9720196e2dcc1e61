"""Commands of the operator, over the unix socket or from the web page, and their lines in the audit log.

Peer credentials of a unix socket: the user and the process at its other end, reported by the kernel.

Bodies of commands on the control socket and the web page.

Endpoints that answer with a struct as JSON.

Commands to models, which the unix socket and the web page share.
"""

import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TypeVar

import msgspec
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.audit_log import Action, AuditActor, AuditTrail, Fact, entry
from gateway.access.caller import OWNER
from gateway.control_types import CommandDone, ModelRef, ModelVerb, OrderAccepted
from gateway.errors import ApiError, BadRequest, from_failure
from gateway.http.bodies import read_body, send_body
from gateway.http.direct_write import writer_of
from gateway.request.record import record_of
from gateway.services import Services
from gateway.workers.supervisor.state import ModelUnavailable
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

    def __init__(self, handler: JsonHandler, status: int = 200) -> None:
        self._handler = handler
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, self._status, msgspec.json.encode(await self._handler(scope, receive)))


def get(path: str, handler: JsonHandler) -> Route:
    return Route(path, JsonEndpoint(handler), methods=["GET"])


def post(path: str, handler: JsonHandler, status: int = 200) -> Route:
    return Route(path, JsonEndpoint(handler, status), methods=["POST"])


_SCOPE_KEY: Final = "mlxd.command"


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


# A verb, its name in the audit log, and the function that carries it out for a model.
_ModelCommand = tuple[ModelVerb, Action, Callable[[str], Awaitable[None]]]
_model_ref: Final = msgspec.json.Decoder(ModelRef)


class ModelCommands:
    """Endpoints of the commands to models.

    If `waits`, a caller gets the result of its command. Otherwise it gets 202 immediately: the model's `last_failure`
    shows a failure, and a repeated command joins the running one.
    """

    def __init__(self, services: Services, *, waits: bool) -> None:
        self._services = services
        self._waits = waits
        self._running: set[tuple[ModelVerb, str]] = set()

    def routes(self, prefix: str) -> list[Route]:
        """Return one route for each verb."""
        pool = self._services.pool
        commands: tuple[_ModelCommand, ...] = (
            ("load", "model.load", pool.load),
            ("unload", "model.unload", pool.unload),
            ("restart", "model.restart", pool.restart),
            ("pin", "model.pin", pool.pin),
            ("unpin", "model.unpin", pool.unpin),
        )
        status = 200 if self._waits else 202
        return [post(f"{prefix}/models/{each[0]}", partial(self._take, each), status) for each in commands]

    async def _take(self, command: _ModelCommand, scope: Scope, receive: Receive) -> CommandDone | OrderAccepted:
        """Carry out `POST` with `{"model": NAME}`, or start to."""
        verb, action, run = command
        ref = await read_order(scope, receive, _model_ref, 'The body must be {"model": NAME}')
        audited = note(scope, Command(action, ref.model))
        audited.target = model = self._services.live.router.resolve(ref.model, OWNER).name
        if not self._waits:
            if (verb, model) not in self._running:
                self._running.add((verb, model))
                self._services.tasks.start(self._carry_out(verb, model, run), f"{verb} of model {model}")
            return OrderAccepted(model, verb)
        worker = self._services.pool.worker(model)
        try:
            await run(model)
        except ModelUnavailable as error:
            raise from_failure(error.failure, error.retry_after_s, is_operator=True) from None
        return CommandDone(model, str(worker.state))

    async def _carry_out(self, verb: ModelVerb, model: str, run: Callable[[str], Awaitable[None]]) -> None:
        try:
            # The model's state machine logs a failure and reports it to all viewers.
            with suppress(ModelUnavailable):
                await run(model)
        finally:
            self._running.discard((verb, model))
