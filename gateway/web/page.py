"""Files of the page, compressed, under headers by which it runs no code but its own and asks no other server."""

from pathlib import Path
from typing import Final

from starlette.middleware.gzip import GZipMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from gateway.request.record import Header, record_of

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
_GZIP_BYTES_MIN: Final = 512
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# On every answer below `/ui`, refusals included.
HEADERS: Final[tuple[Header, ...]] = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
# A browser asks whether its copy is still the newest.
_CACHE: Final[Header] = (b"cache-control", b"no-cache")


class Page:
    """Pure ASGI below a prefix. Files are public: they hold nothing of this machine."""

    def __init__(self, prefix: str, folder: Path = FOLDER) -> None:
        self._prefix = prefix
        self._files = GZipMiddleware(StaticFiles(directory=folder), minimum_size=_GZIP_BYTES_MIN)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record_of(scope).always.append(_CACHE)
        name = scope["path"].removeprefix(self._prefix) or INDEX
        # Never through `request.url`, which is made of the client's `Host`.
        await self._files(dict(scope) | {"path": f"/{name}", "root_path": ""}, receive, send)
