"""Sessions of the web page. A one-time code from the unix socket is exchanged for a bearer token.

Codes and tokens have 256 random bits. Only their hashes are kept: those of codes in memory, those of tokens also in a
private file, so that sessions outlive the daemon.

File with the sessions of the page, so that the next daemon honours them. It holds hashes, which open nothing.

Checks of requests of the web page: host, origin, address and session.

Login and logout of the web page, the visitor's identity, and login codes, which are made over the unix socket.
"""

import asyncio
import hashlib
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

import protocol
from gateway.access.audit_log import AuditActor, entry
from gateway.access.key import SECRET_START
from gateway.access.rate_limit import Throttle
from gateway.config.address import Address, from_here
from gateway.control.commands import Command, note, read_order
from gateway.control_types import UiCode, UiRevoked
from gateway.disk_and_clock import WallClock
from gateway.errors import ApiError, Forbidden, Unauthorized
from gateway.http.bodies import json_response
from gateway.http.own_names import OwnNames
from gateway.request.record import record_of
from gateway.request.routing import LiveConfig
from gateway.services import Services
from gateway.state_dir import WriteOrder
from gateway.telemetry.metrics import Metrics
from gateway.web.schemas import LoggedIn, LogIn, Me, OwnUsage

log = logging.getLogger(__name__)

_CONTENT: Final = "the list of sessions of the page"


class SavedSession(Struct, frozen=True):
    """A session with the hash of its token and the Unix time of its last use."""

    id: str
    digest: bytes
    used: float


class SessionFile:
    """Reads the file once, and writes it whole after changes."""

    def __init__(self, path: Path) -> None:
        self._order = WriteOrder(path, content=_CONTENT)

    def read(self) -> list[SavedSession]:
        """Return the sessions; none if there is no file, or if it cannot be read, which is logged."""
        try:
            return msgspec.json.decode(self._order.path.read_bytes(), type=list[SavedSession])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            log.warning("%s is not read: %s: %s", _CONTENT, self._order.path, error)
            return []

    async def write(self, sessions: Iterable[SavedSession]) -> None:
        """Write the sessions as they are now. A failure is logged; the sessions then end with the daemon."""
        number, data = self._order.take(), msgspec.json.encode(list(sessions))
        await asyncio.to_thread(self._order.write, number, data)


# This prefix distinguishes tokens from API keys.
TOKEN_START: Final = "mlxd-ui-"
SECRET_BYTES: Final = 32
CODE_S: Final = 60.0
CODES_MAX: Final = 8
IDLE_S: Final = 14 * 86400.0
SESSIONS_MAX: Final = 32
# Uses are saved this often, so that a page that is looked at writes no file all the time.
SAVE_S: Final = 3600.0
_SECRET_CHARS_MAX: Final = 128


@dataclass(slots=True)
class WebSession:
    """One login. `id` identifies it in the audit log and grants no access."""

    id: str
    used: float
    saved: float = 0.0
    is_over: bool = False


class Sessions:
    """Valid codes and sessions. The number of each is bounded: a new code replaces the oldest code, and a new session
    the least recently used one.
    """

    def __init__(self, saved: Iterable[SavedSession] = (), clock: Callable[[], float] | None = None) -> None:
        """Continue the sessions that an earlier daemon has saved."""
        self._clock = clock or WallClock()
        # Maps the hash of each code to its expiry.
        self._codes: OrderedDict[bytes, float] = OrderedDict()
        # Maps the hash of each token to its session, the least recently used first.
        self._sessions: OrderedDict[bytes, WebSession] = OrderedDict(
            (each.digest, WebSession(each.id, each.used, each.used))
            for each in sorted(saved, key=lambda each: each.used)[-SESSIONS_MAX:]
        )

    def make_code(self) -> str:
        """Make a code that is valid for one login, within `CODE_S` seconds."""
        self._forget_old()
        if len(self._codes) >= CODES_MAX:
            self._codes.popitem(last=False)
        code = secrets.token_urlsafe(SECRET_BYTES)
        self._codes[_digest(code)] = self._clock() + CODE_S
        return code

    def redeem(self, code: str) -> tuple[str, WebSession] | None:
        """Exchange a code for a token and a session. None if the code is unknown, used or expired."""
        self._forget_old()
        if len(code) > _SECRET_CHARS_MAX or self._codes.pop(_digest(code), None) is None:
            return None
        if len(self._sessions) >= SESSIONS_MAX:
            self._sessions.popitem(last=False)[1].is_over = True
        token = TOKEN_START + secrets.token_urlsafe(SECRET_BYTES)
        session = WebSession(secrets.token_hex(4), self._clock())
        self._sessions[_digest(token)] = session
        return token, session

    def use(self, token: str) -> WebSession | None:
        """Return the session of a token and reset its idle time; None for an invalid token."""
        self._forget_old()
        key = _digest(token) if len(token) <= _SECRET_CHARS_MAX else b""
        session = self._sessions.get(key)
        if session is not None:
            session.used = self._clock()
            self._sessions.move_to_end(key)
        return session

    def is_alive(self, session: WebSession) -> bool:
        """Whether a session has neither ended nor expired. Does not reset its idle time."""
        return not session.is_over and self._clock() - session.used < IDLE_S

    def end(self, session: WebSession) -> None:
        session.is_over = True
        self._sessions = OrderedDict((key, kept) for key, kept in self._sessions.items() if kept is not session)

    def revoke(self) -> int:
        """End every session and code. Returns the number of sessions that ended."""
        self._forget_old()
        count = len(self._sessions)
        for session in self._sessions.values():
            session.is_over = True
        self._sessions.clear()
        self._codes.clear()
        return count

    @property
    def is_unsaved(self) -> bool:
        """Whether a session was used so long after its last save that the next daemon should know."""
        return any(session.used - session.saved >= SAVE_S for session in self._sessions.values())

    def save(self) -> list[SavedSession]:
        """Return the sessions for the file, as saved now."""
        self._forget_old()
        for session in self._sessions.values():
            session.saved = session.used
        return [SavedSession(session.id, digest, session.used) for digest, session in self._sessions.items()]

    def _forget_old(self) -> None:
        now = self._clock()
        while self._codes and next(iter(self._codes.values())) <= now:
            self._codes.popitem(last=False)
        while self._sessions and now - next(iter(self._sessions.values())).used >= IDLE_S:
            self._sessions.popitem(last=False)[1].is_over = True


def _digest(secret: str) -> bytes:
    return hashlib.blake2b(secret.encode(), digest_size=32, person=b"mlxd-ui").digest()


NOT_A_SESSION: Final = "Open the page with 'mlxctl ui': its session has ended, or there is none."


class Gate:
    """Checks requests of the web page. All checks but that of the token come first, so the token of a refused request
    is not read.
    """

    def __init__(self, sessions: Sessions, live: LiveConfig, throttle: Throttle, metrics: Metrics) -> None:
        self.sessions = sessions
        self._live = live
        self._throttle = throttle
        self._metrics = metrics
        self._names = OwnNames(live, metrics)

    def check_host(self, scope: Scope) -> None:
        """Check the `Host` header. Raises `Misdirected`."""
        self._names.check_host(Headers(scope=scope), takes_addresses=True)

    def check_visitor(self, scope: Scope) -> None:
        """Check that administration is on, that the client's machine is allowed, and the host and origin.

        Raises `Forbidden` or `Misdirected`.
        """
        self.check_host(scope)
        admin = self._live.config.ui.admin
        if admin == "off":
            raise Forbidden("Administration by the page is switched off: [ui] admin in mlxd.toml.")
        if admin == "loopback" and not _is_here(record_of(scope).client, scope):
            raise Forbidden(
                'Administration by the page is for this machine only. For other machines set [ui] admin = "network".'
            )
        if not self._names.is_own_page(Headers(scope=scope)):
            self._names.refuse_page("Only mlxd's own page administers it.")

    def session(self, scope: Scope) -> WebSession:
        """Return the session of a request. Raises `Unauthorized`, `Forbidden`, `Misdirected` or `RateLimited`."""
        self.check_visitor(scope)
        token = bearer(scope)
        session = self.sessions.use(token) if token.startswith(TOKEN_START) else None
        if session is None:
            self.fail(scope)
            if token.startswith(SECRET_START):
                raise Forbidden("No API key administers mlxd: open the page with 'mlxctl ui'.")
            raise Unauthorized(NOT_A_SESSION, "no_session")
        return session

    def opens(self, scope: Scope) -> bool:
        """Whether the request has a valid session token; False if it has none. Raises as `session` does."""
        if not has_session_token(scope):
            return False
        self.session(scope)
        return True

    def fail(self, scope: Scope) -> None:
        """Count a request without a valid code or token. Raises `RateLimited`."""
        self._metrics.auth_failures["ui"] += 1
        self._throttle.fail(record_of(scope).client)


def _is_here(client: Address, scope: Scope) -> bool:
    """Whether the client is on this machine: its address is on the loopback, or equal to the address that it connected
    to.
    """
    if client.is_hidden:
        return False
    server = scope.get("server")
    return client.is_loopback or (not client.is_forwarded and server is not None and client.host == server[0])


def bearer(scope: Scope) -> str:
    """Return the token of `Authorization: Bearer`; empty without one."""
    value = Headers(scope=scope).get("authorization", "")
    return value[7:].strip() if value[:7].lower() == "bearer " else ""


def has_session_token(scope: Scope) -> bool:
    """Whether the request has a session token, valid or not."""
    return bearer(scope).startswith(TOKEN_START)


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
