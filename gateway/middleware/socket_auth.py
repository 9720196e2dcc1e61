"""Authentication of the admin socket: its file permissions let only the owner connect."""

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.caller import OWNER
from gateway.request.record import record_of


class TrustedClient:
    """ASGI app that replaces `Auth` on the unix socket, where every client is the owner."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).caller = OWNER
        await self._app(scope, receive, send)
