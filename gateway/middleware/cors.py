"""CORS for the web origins in `[server] cors`. If the list is empty, no answer has CORS headers.

Keys are sent in headers, never in cookies, so credentials are never allowed, and origins are listed one by one.
"""

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.request.record import Header, record_of
from gateway.request.routing import LiveConfig

METHODS: Final = b"GET, POST, DELETE"
MAX_AGE_S: Final = b"600"
EXPOSED: Final = (
    b"retry-after, x-request-id, x-mlxd-seed, x-mlxd-ignored, x-mlxd-relaxed, x-mlxd-truncated, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
_HEADER_NAMES: Final = re.compile(r"[A-Za-z0-9_\-, ]{0,2000}")


class Cors:
    """ASGI app that answers preflight requests before authentication, because browsers send no key with them."""

    def __init__(self, app: ASGIApp, live: LiveConfig) -> None:
        self._app = app
        self._live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origins = self._live.config.server.cors
        if not origins:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        record = record_of(scope)
        # Caches must not use the answer to one origin for another.
        record.always.append((b"vary", b"Origin"))
        if origin not in origins:
            await self._app(scope, receive, send)
            return
        record.always.append((b"access-control-allow-origin", origin.encode()))
        record.always.append((b"access-control-expose-headers", EXPOSED))
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await send({"type": "http.response.start", "status": 204, "headers": _preflight(headers)})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            await self._app(scope, receive, send)


def _preflight(headers: Headers) -> list[Header]:
    requested = headers.get("access-control-request-headers", "")
    allowed = requested if _HEADER_NAMES.fullmatch(requested) else ""
    answer: list[Header] = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", (allowed or "authorization, content-type, x-api-key").encode()),
        (b"access-control-max-age", MAX_AGE_S),
    ]
    if headers.get("access-control-request-private-network") == "true":
        answer.append((b"access-control-allow-private-network", b"true"))
    return answer
