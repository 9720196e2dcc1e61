"""Login and logout of the web page, the visitor's identity, and login codes, which are made over the unix socket."""

from collections.abc import Callable
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

import protocol
from gateway.access.audit_log import AuditActor, entry
from gateway.config.address import from_here
from gateway.control.command_body import read_order
from gateway.control.commands import Command, note
from gateway.control_types import UiCode, UiRevoked
from gateway.errors import ApiError, Forbidden
from gateway.http.exchange import json_response
from gateway.request.record import record_of
from gateway.services import Services
from gateway.web.gate import Gate, has_session_token
from gateway.web.schemas import LoggedIn, LogIn, Me, OwnUsage
from gateway.web.session import CODE_S, IDLE_S, WebSession
from gateway.web.session_file import SessionFile

_log_in: Final = msgspec.json.Decoder(LogIn)


class Entrance:
    """Endpoints for sessions on the web page, and for login codes on the unix socket."""

    def __init__(self, services: Services, gate: Gate, file: SessionFile) -> None:
        self._services = services
        self._gate = gate
        self._file = file

    def socket_routes(self, url: Callable[[], str]) -> list[Route]:
        """Return the routes for the admin app. `url` is a function that returns the daemon's address."""

        async def make_code(request: Request) -> Response:
            return self._make_code(request, f"{from_here(url())}/ui/")

        return [
            Route("/v1/ui/code", make_code, methods=["POST"]),
            Route("/v1/ui/revoke", self._revoke, methods=["POST"]),
        ]

    async def log_in_or_out(self, request: Request) -> Response:
        # Both methods share one route, because a 405 answer lists only the methods of the first route with the path.
        return await (self._log_out if request.method == "DELETE" else self._log_in)(request)

    async def _log_in(self, request: Request) -> Response:
        """Exchange a login code for a session."""
        record = record_of(request.scope)
        opened = self._gate.sessions.redeem((await read_order(request.scope, request.receive, _log_in)).code)
        if opened is None:
            # Wrong codes are not logged, so that unauthenticated clients cannot fill the audit log.
            self._gate.fail(request.scope)
            raise ApiError(
                403, "The link is not valid any more: run 'mlxctl ui' again.", code="bad_code", type="permission_error"
            )
        token, session = opened
        await self._save()
        self._services.audit.record(entry("ui.login", session.id, client=str(record.client), actor=AuditActor()))
        return json_response(LoggedIn(token, IDLE_S, protocol.__version__))

    async def _log_out(self, request: Request) -> Response:
        """End the session of the request."""
        self._gate.sessions.end(session_of(request.scope))
        await self._save()
        return json_response({})

    async def show_visitor(self, request: Request) -> Response:
        """Answer `GET /ui/api/me`, which describes the request's caller."""
        services, caller = self._services, record_of(request.scope).caller
        is_session = has_session_token(request.scope)
        usage = None
        if caller.key is not None:
            numbers = services.metrics.key(caller.key)
            requests = sum(numbers.requests.values())
            rejections = dict(numbers.rejections)
            usage = OwnUsage(requests, numbers.prompt_tokens, numbers.generation_tokens, numbers.running, rejections)
        return json_response(
            Me(
                visitor="session" if is_session else "open" if caller.key is None else "key",
                may_administer=is_session,
                admin=services.config.ui.admin,
                version=protocol.__version__,
                models=[model.name for model in caller.usable(services.config.models.values())],
                key=caller.key,
                usage=usage,
            )
        )

    def _make_code(self, request: Request, page: str) -> Response:
        note(request.scope, Command("ui.code"))
        if self._services.config.ui.admin == "off":
            raise Forbidden(f'[ui] admin is "off": nothing is administered by the page. For chat open {page}')
        code = self._gate.sessions.make_code()
        return json_response(UiCode(f"{page}#code={code}", code, CODE_S))

    async def _revoke(self, request: Request) -> Response:
        order = note(request.scope, Command("ui.revoke"))
        revoked = UiRevoked(self._gate.sessions.revoke())
        await self._save()
        order.facts = {"sessions": revoked.sessions}
        return json_response(revoked)

    def save_uses(self) -> None:
        """Save that sessions were used, if the next daemon does not know it yet."""
        if self._gate.sessions.is_unsaved:
            self._services.tasks.start(self._save(), "save of sessions")

    async def _save(self) -> None:
        # Before the answer: a session that its visitor has ended must not come back with the next daemon.
        await self._file.write(self._gate.sessions.save())


def session_of(scope: Scope) -> WebSession:
    """Return the session that the gate has stored in the scope."""
    session = scope["mlxd.session"]
    assert isinstance(session, WebSession)
    return session
