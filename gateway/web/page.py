"""Files of the web page. They are compressed once and served from memory, with headers that forbid foreign code.

A request for an unchanged file costs little, because clients without a key must not be able to load the event loop.
"""

import asyncio
import gzip
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.errors import ApiError
from gateway.request.record import Header, record_of

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
