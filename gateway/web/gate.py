"""Checks of requests of the web page: host, origin, address and session."""

import socket
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

from gateway.access.key_file import SECRET_START
from gateway.access.unauthenticated import Throttle
from gateway.config.address import Address
from gateway.config.origins import is_address, is_same, is_served
from gateway.errors import Forbidden, Misdirected, Unauthorized
from gateway.request.record import record_of
from gateway.request.routing import LiveConfig
from gateway.telemetry.metrics import Metrics
from gateway.web.session import TOKEN_START, Sessions, WebSession

# Requests of the page itself have one of these values in Sec-Fetch-Site; `none` means that no page made the request.
_OWN_SITE: Final = ("same-origin", "none")
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
        name = socket.gethostname().lower()
        bare = name.removesuffix(".local")
        self._names = frozenset({name, bare, f"{bare}.local"})

    def check_host(self, scope: Scope) -> None:
        """Check the `Host` header: an attacker may resolve a foreign host name to this machine. Raises `Misdirected`.

        IP addresses need no check, because they cannot be made to resolve to another machine.
        """
        server = self._live.config.server
        names = (*server.hosts, server.host, *self._names)
        for host in Headers(scope=scope).getlist("host"):
            if not is_served(host, names) and not is_address(host):
                self._metrics.auth_failures["host"] += 1
                raise Misdirected(
                    f"mlxd's page is not served as {host[:200]!r}. Add that name to [server] hosts in mlxd.toml."
                )

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
        self._check_origin(Headers(scope=scope))

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

    def _check_origin(self, headers: Headers) -> None:
        """Check that the origin equals the requested host, including the port. Raises `Forbidden`."""
        origin = headers.get("origin")
        if origin is not None:
            is_own = is_same(origin, headers.get("host", ""))
        else:
            is_own = headers.get("sec-fetch-site", "none").lower() in _OWN_SITE
        if not is_own:
            self._metrics.auth_failures["origin"] += 1
            raise Forbidden("Only mlxd's own page administers it.")


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
