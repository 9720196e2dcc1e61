"""Routing of the web page in the public app: `/ui/`, `/ui/api/`, and a redirect from `/`."""

from typing import Final

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.caller import OWNER
from gateway.errors import ApiError
from gateway.http.exchange import came_to
from gateway.request.record import record_of
from gateway.request.routing import LiveConfig
from gateway.web.gate import Gate, has_session_token
from gateway.web.page import HEADERS, Page

UI: Final = "/ui/"
API: Final = "/ui/api/"
LOG_IN: Final = "/ui/api/session"
ME: Final = "/ui/api/me"
_JSON: Final = "application/json"
_BODIES: Final = ("POST", "PUT", "PATCH")


class Site:
    """ASGI app of the web page. `app` gets the requests outside of `/ui`, and `api` those with a session. `me` also
    serves clients with an API key, and clients on the loopback while no key was ever made.
    """

    def __init__(self, app: ASGIApp, api: ASGIApp, me: ASGIApp, gate: Gate, live: LiveConfig) -> None:
        self._live = live
        self._app = app
        self._api = api
        self._me = me
        self._gate = gate
        self._page = Page(UI)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith(UI):
            record_of(scope).always += HEADERS
            self._gate.check_host(scope)
            if path.startswith(API):
                await self._serve_api(scope, receive, send)
            else:
                await self._page(scope, receive, send)
        elif path == "/ui" or (path == "/" and _is_browser(scope) and not self._serves_ollama(scope)):
            self._gate.check_host(scope)
            # The redirect is relative, so that a proxy may serve mlxd below a path of its own.
            await RedirectResponse("ui/", 303, {"cache-control": "no-store"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _serves_ollama(self, scope: Scope) -> bool:
        """Whether `/` must answer as Ollama does."""
        return came_to(scope, self._live.config.server.ollama_port)

    async def _serve_api(self, scope: Scope, receive: Receive, send: Send) -> None:
        record, path = record_of(scope), scope["path"]
        record.always.append((b"cache-control", b"no-store"))
        if path == ME and not has_session_token(scope):
            await self._me(scope, receive, send)
            return
        if scope["method"] in _BODIES:
            _check_type(scope)
        if path == LOG_IN and scope["method"] == "POST":
            self._gate.check_visitor(scope)
        else:
            scope["mlxd.session"] = self._gate.session(scope)
            record.caller = OWNER
        await self._api(scope, receive, send)


def _is_browser(scope: Scope) -> bool:
    return scope["method"] in ("GET", "HEAD") and "text/html" in Headers(scope=scope).get("accept", "")


def _check_type(scope: Scope) -> None:
    """Require JSON, which no form of another page can send. Raises `ApiError`."""
    kind = Headers(scope=scope).get("content-type", "").partition(";")[0].strip().lower()
    if kind != _JSON:
        raise ApiError(415, f"The body must be {_JSON}.", code="unsupported_media_type")
