"""Login and logout of the page, the visitor's identity, and login codes made over the unix socket."""

from collections.abc import Callable
from typing import Final

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

import protocol
from gateway.access.audit_log import AuditActor, entry
from gateway.config.address import from_here
from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.control_types import UiCode, UiRevoked
from gateway.errors import ApiError, Forbidden
from gateway.http.exchange import send_body
from gateway.request.record import record_of
from gateway.services import Services
from gateway.web.gate import Gate, has_session_token
from gateway.web.schemas import LoggedIn, LogIn, Me, OwnUsage
from gateway.web.session import CODE_S, IDLE_S, WebSession

_encode: Final = msgspec.json.Encoder().encode
_log_in: Final = msgspec.json.Decoder(LogIn)


class LogInOrOut:
    """`POST` and `DELETE /ui/api/session`."""

    def __init__(self, services: Services, gate: Gate) -> None:
        self._services = services
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "DELETE":
            self._gate.sessions.end(session_of(scope))
            await send_body(send, 200, b"{}")
            return
        order = await read_order(scope, receive, _log_in)
        opened = self._gate.sessions.redeem(order.code)
        self._record(scope, None if opened is None else opened[1])
        if opened is None:
            self._gate.fail(scope)
            raise ApiError(
                403, "The link is not valid any more: run 'mlxctl ui' again.", code="bad_code", type="permission_error"
            )
        await send_body(send, 200, _encode(LoggedIn(opened[0], IDLE_S, protocol.__version__)))

    def _record(self, scope: Scope, session: WebSession | None) -> None:
        # Wrong codes are not logged, so that unauthenticated clients cannot roll the audit log.
        if session is not None:
            client = str(record_of(scope).client)
            self._services.audit.record(entry("ui.login", session.id, client=client, actor=AuditActor()))


class WhoAmI:
    """`GET /ui/api/me`, which describes the request's caller."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, caller = self._services, record_of(scope).caller
        is_session = has_session_token(scope)
        usage = None
        if caller.key is not None:
            numbers = services.metrics.key(caller.key)
            requests = sum(numbers.requests.values())
            rejections = dict(numbers.rejections)
            usage = OwnUsage(requests, numbers.prompt_tokens, numbers.generation_tokens, numbers.running, rejections)
        me = Me(
            visitor="session" if is_session else "open" if caller.key is None else "key",
            may_administer=is_session,
            admin=services.config.ui.admin,
            version=protocol.__version__,
            models=[model.name for model in caller.usable(services.config.models.values())],
            key=caller.key,
            usage=usage,
        )
        await send_body(send, 200, _encode(me))


class MakeCode:
    """`POST /v1/ui/code` on the unix socket."""

    def __init__(self, gate: Gate, services: Services, url: Callable[[], str]) -> None:
        self._gate = gate
        self._services = services
        self._url = url

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note(scope, Command("ui.code"))
        page = f"{from_here(self._url())}/ui/"
        if self._services.config.ui.admin == "off":
            raise Forbidden(f'[ui] admin is "off": nothing is administered by the page. For chat open {page}')
        code = self._gate.sessions.make_code()
        await send_body(send, 200, _encode(UiCode(f"{page}#code={code}", code, CODE_S)))


class Revoke:
    """`POST /v1/ui/revoke` on the unix socket."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        order = note(scope, Command("ui.revoke"))
        revoked = UiRevoked(self._gate.sessions.revoke())
        order.facts = {"sessions": revoked.sessions}
        await send_body(send, 200, _encode(revoked))


def socket_routes(gate: Gate, services: Services, url: Callable[[], str]) -> list[Route]:
    """Return the routes of the admin app."""
    return [
        Route("/v1/ui/code", MakeCode(gate, services, url), methods=["POST"]),
        Route("/v1/ui/revoke", Revoke(gate), methods=["POST"]),
    ]


def session_of(scope: Scope) -> WebSession:
    """Return the session that the gate has set."""
    session = scope["mlxd.session"]
    assert isinstance(session, WebSession)
    return session
