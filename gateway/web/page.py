"""Files of the web page. They are compressed once and served from memory, with headers that forbid foreign code.

A request for an unchanged file costs little, because clients without a key must not be able to load the event loop.

Routing of the web page in the public app: `/ui/`, `/ui/api/`, and a redirect from `/`.
"""

import asyncio
import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.caller import OWNER
from gateway.errors import ApiError
from gateway.http.bodies import came_to
from gateway.request.record import Header, record_of
from gateway.request.routing import LiveConfig
from gateway.web.session import Gate, has_session_token

FOLDER: Final = Path(__file__).parent / "page"
INDEX: Final = "index.html"
# The path of a file below the folder. No part of it begins with a dot.
_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(?:/[A-Za-z0-9_-][A-Za-z0-9._-]*){0,7}")
_NAME_MAX: Final = 200
_TYPES: Final = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".json": b"application/json",
    ".webmanifest": b"application/manifest+json",
    ".svg": b"image/svg+xml",
    ".png": b"image/png",
    ".woff2": b"font/woff2",
    ".txt": b"text/plain; charset=utf-8",
}
_UNKNOWN_TYPE: Final = b"text/plain; charset=utf-8"
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# Every answer below `/ui` has these headers, including refusals.
HEADERS: Final[tuple[Header, ...]] = (
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
# The browser must revalidate its copy before each use.
_CACHE: Final[Header] = (b"cache-control", b"no-cache")


@dataclass(frozen=True, slots=True)
class _PageFile:
    """One file as it is sent. `stamp` identifies the version of the file on the disk."""

    stamp: tuple[int, int]
    etag: bytes
    kind: bytes
    plain: bytes
    # `compressed` is empty if compression makes the file no smaller.
    compressed: bytes


class Page:
    """ASGI app for the files of the web page. They are public and contain nothing about this machine."""

    def __init__(self, prefix: str, folder: Path = FOLDER) -> None:
        self._prefix = prefix
        self._folder = folder
        self._files: dict[str, _PageFile] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            raise ApiError(405, f"{scope['method']} is not allowed here.", code="method_not_allowed")
        record_of(scope).always.append(_CACHE)
        file = await self._find(scope["path"].removeprefix(self._prefix) or INDEX)
        if file is None:
            raise ApiError(404, "The page has no such file.", code="unknown_url")
        await _send(file, scope, send)

    async def _find(self, name: str) -> _PageFile | None:
        if len(name) > _NAME_MAX or not _NAME.fullmatch(name):
            return None
        path, known = self._folder / name, self._files.get(name)
        try:
            status = path.stat()
        except OSError:
            return None
        stamp = (status.st_mtime_ns, status.st_size)
        if known is None or known.stamp != stamp:
            if not path.is_file():
                return None
            known = self._files[name] = await asyncio.to_thread(_read, path, stamp)
        return known


def _read(path: Path, stamp: tuple[int, int]) -> _PageFile:
    plain = path.read_bytes()
    compressed = gzip.compress(plain, 9, mtime=0)
    etag = b'"%b"' % hashlib.blake2b(plain, digest_size=16).hexdigest().encode()
    kind = _TYPES.get(path.suffix, _UNKNOWN_TYPE)
    return _PageFile(stamp, etag, kind, plain, compressed if len(compressed) < len(plain) * 0.9 else b"")


async def _send(file: _PageFile, scope: Scope, send: Send) -> None:
    request_headers = Headers(scope=scope)
    headers: list[Header] = [(b"etag", file.etag), (b"vary", b"Accept-Encoding")]
    known = [tag.strip().removeprefix("W/") for tag in request_headers.get("if-none-match", "").split(",")]
    body, status = file.plain, 200
    if file.etag.decode() in known:
        body, status = b"", 304
    else:
        headers.append((b"content-type", file.kind))
        if file.compressed and "gzip" in request_headers.get("accept-encoding", ""):
            body = file.compressed
            headers.append((b"content-encoding", b"gzip"))
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body if scope["method"] == "GET" else b"", "more_body": False})


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
