"""Captures of the newest requests and their answers, for debugging. They are private files, and off unless configured.

The number, size and age of captures are limited. Headers that may contain a secret are never written.

Replaces long runs of base64 in a body by their decoded size and the digest of the decoded bytes.

A body is filtered in pieces. Logs and caches identify a request's media by the same digest.
"""

import asyncio
import binascii
import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from starlette.types import Message, Receive, Scope, Send

from gateway.config.settings import ServerConfig
from gateway.control_types import CapturedLine, CapturedRequest
from gateway.disk_and_clock import WallClock
from gateway.http.bodies import FORM
from gateway.request.record import Header, RequestRecord

log = logging.getLogger(__name__)

# Only runs of at least this many base64 characters are replaced. Keys, hashes and words are shorter.
RUN_MIN: Final = 1024
# A match must begin where a run begins; otherwise the time would grow with the square of the run's length.
_TAIL: Final = re.compile(rb"(?<![A-Za-z0-9+/_=-])[A-Za-z0-9+/_=-]*\Z")
_RUN: Final = re.compile(rb"(?<![A-Za-z0-9+/_=-])[A-Za-z0-9+/_=-]{%d,}" % RUN_MIN)
_HEAD: Final = re.compile(rb"[A-Za-z0-9+/_=-]*")
_URL_SAFE: Final = bytes.maketrans(b"-_", b"+/")


class MediaDigests:
    """Filter that replaces media in one body, piece by piece.

    `feed` takes a piece and returns the output that is final; `finish` returns the rest.
    """

    def __init__(self) -> None:
        self._tail = b""
        self._run: _Run | None = None

    def feed(self, piece: bytes) -> bytes:
        if self._run is not None:
            head = _HEAD.match(piece)
            assert head is not None, "it matches nothing as well"
            self._run.add(head[0])
            if head.end() == len(piece):
                return b""
            kept, self._run = self._run.placeholder(), None
            return kept + self.feed(piece[head.end() :])
        text = self._tail + piece
        tail = _TAIL.search(text)
        assert tail is not None, "it matches nothing as well"
        whole, self._tail = text[: tail.start()], tail[0]
        kept = _RUN.sub(lambda match: _placeholder(match[0]), whole)
        if len(self._tail) >= RUN_MIN:
            self._run, self._tail = _Run(self._tail), b""
        return kept

    def finish(self) -> bytes:
        return self._run.placeholder() if self._run is not None else self._tail


class _Run:
    """Run of base64 characters, of which only a few undecoded characters are kept in memory."""

    def __init__(self, beginning: bytes) -> None:
        self._digest = hashlib.blake2b(digest_size=32)
        self._held = b""
        self._size = 0
        self._is_base64 = True
        self.add(beginning)

    def add(self, piece: bytes) -> None:
        text = self._held + piece
        whole = len(text) // 4 * 4
        self._held = text[whole:]
        try:
            data = binascii.a2b_base64(text[:whole].translate(_URL_SAFE))
        except binascii.Error:
            self._is_base64 = False
            return
        self._digest.update(data)
        self._size += len(data)

    def placeholder(self) -> bytes:
        if self._held:
            self.add(b"=" * (4 - len(self._held)))
        digest = f", blake2b-256 {self._digest.hexdigest()}" if self._is_base64 else ""
        return f"[{self._size} bytes of base64 not kept{digest}]".encode()


def _placeholder(run: bytes) -> bytes:
    return _Run(run).placeholder()


T = TypeVar("T")

# This limit applies separately to a request's body and to its answer's body.
BODY_BYTES_MAX: Final = 4 * 1024 * 1024
# Maximum number of captures that wait for the disk; further captures are dropped.
PENDING_MAX: Final = 64
SWEEP_INTERVAL_S: Final = 60.0
CAPTURES_BYTES_MAX: Final = 64 * 1024 * 1024
CAPTURE_AGE_S: Final = 86400.0
REDACTED: Final = "[redacted]"
# Bodies of these content types are replaced by their size and digest.
_AUDIO: Final = b"audio/"
_SECRET_WORDS: Final = ("auth", "cookie", "credential", "key", "password", "secret", "session", "token")

_whole = msgspec.json.Decoder(CapturedRequest)
_line = msgspec.json.Decoder(CapturedLine)


class Recorder:
    """Recorder of one request, which wraps its `receive` and `send`."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._headers: list[Header] = scope["headers"]
        self._receive = receive
        self._send = send
        kind = next((value for name, value in self._headers if name.lower() == b"content-type"), b"")
        self._request_body: _Body | _BodyDigest = _BodyDigest() if kind.startswith(FORM) else _Body(MediaDigests())
        self._response_body: _Body | _BodyDigest = _Body()
        self._response_headers: list[Header] = []

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._request_body.add(message.get("body", b""))
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._response_headers = list(message.get("headers", ()))
            if any(name == b"content-type" and value.startswith(_AUDIO) for name, value in self._response_headers):
                self._response_body = _BodyDigest()
        else:
            self._response_body.add(message.get("body", b""))
        await self._send(message)

    def captured(self, record: RequestRecord) -> CapturedRequest:
        """Return the capture of a request that has ended."""
        elapsed_s = record.clock() - record.started
        return CapturedRequest(
            id=record.id,
            at=time.time() - elapsed_s,
            method=record.method,
            path=record.path,
            model=record.model or "",
            key=record.caller.key,
            status=record.status,
            outcome=record.outcome or "ok",
            ms=round(elapsed_s * 1000, 1),
            request_headers=_redacted(self._headers),
            request_body=self._request_body.text(),
            is_request_cut=self._request_body.is_cut,
            response_headers=_redacted(self._response_headers),
            response_body=self._response_body.text(),
            is_response_cut=self._response_body.is_cut,
        )


class _Body:
    """Records the beginning of a body. With `media`, base64 data in the body is replaced by digests."""

    def __init__(self, media: MediaDigests | None = None) -> None:
        self._media = media
        self._chunks: list[bytes] = []
        self._size = 0
        self.is_cut = False

    def add(self, chunk: bytes) -> None:
        self._keep(chunk if self._media is None else self._media.feed(chunk))

    def _keep(self, chunk: bytes) -> None:
        room = BODY_BYTES_MAX - self._size
        self.is_cut |= len(chunk) > room
        if chunk and room > 0:
            self._chunks.append(chunk[:room])
            self._size += len(self._chunks[-1])

    def text(self) -> str:
        """Return the recorded text. No method may be called after this."""
        if self._media is not None:
            self._keep(self._media.finish())
        return b"".join(self._chunks).decode(errors="replace")


class _BodyDigest:
    """Records the size and digest of a body that is not text: a form with a file, or an audio file."""

    is_cut = False

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=32)
        self._size = 0

    def add(self, chunk: bytes) -> None:
        self._digest.update(chunk)
        self._size += len(chunk)

    def text(self) -> str:
        """Return size and digest as text. No method may be called after this."""
        return f"[{self._size} bytes, {self._digest.hexdigest()[:16]}]"


def _redacted(headers: list[Header]) -> list[tuple[str, str]]:
    """Replace values of headers that may be secrets."""
    named = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
    return [(name, REDACTED if any(word in name for word in _SECRET_WORDS) else value) for name, value in named]


@dataclass(frozen=True, slots=True)
class _CaptureFile:
    """A stored capture file. Only the thread of `Captures` uses it."""

    path: Path
    size: int
    line: CapturedLine


class Captures:
    """Ring of captures, with one file per request. One thread does all work on files, in the order of the calls."""

    def __init__(
        self,
        folder: Path,
        settings: Callable[[], ServerConfig],
        clock: WallClock | None = None,
        bytes_max: int = CAPTURES_BYTES_MAX,
        age_s: float = CAPTURE_AGE_S,
    ) -> None:
        self.bytes_max = bytes_max
        self.age_s = age_s
        self._folder = folder
        self._settings = settings
        self._now = clock or WallClock()
        self._thread = ThreadPoolExecutor(1, "captures")
        self._room = threading.Semaphore(PENDING_MAX)
        self._is_failing = False
        # Stored files, the oldest first; None until the folder was read. Only the thread uses the list.
        self._ring: list[_CaptureFile] | None = None

    @property
    def is_on(self) -> bool:
        return self._settings().capture > 0

    def put(self, captured: CapturedRequest) -> None:
        """Queue a request for storing. A failure is logged."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._put, captured)
        else:
            self._note_failure("the disk does not keep up")

    async def lines(self) -> list[CapturedLine]:
        """List the captures, oldest first."""
        return await self._call(lambda: [kept.line for kept in self._swept()])

    async def find(self, request_id: str) -> CapturedRequest | None:
        """Return the newest capture with this id."""
        return await self._call(lambda: self._find(request_id))

    async def run(self) -> None:
        """Delete expired captures periodically, until cancelled."""
        while True:
            await self.sweep()
            await asyncio.sleep(SWEEP_INTERVAL_S)

    async def sweep(self) -> None:
        """Delete captures that exceed the limits."""
        await self._call(self._swept)

    async def clear(self) -> int:
        """Delete all captures and return their number."""
        return await self._call(self._clear)

    def close(self) -> None:
        """Finish the queued work and end the thread."""
        self._thread.shutdown()

    async def _call(self, action: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, action)

    # The methods below run on the thread.

    def _put(self, captured: CapturedRequest) -> None:
        self._room.release()
        data = msgspec.json.encode(captured)
        digest = hashlib.sha256(captured.id.encode()).hexdigest()[:16]
        path = self._folder / f"{time.time_ns():020d}-{digest}.json"
        try:
            kept = self._swept()
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(path, "xb", opener=_private) as file:
                file.write(data)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            self._note_failure(error.strerror or str(error))
            return
        self._is_failing = False
        kept.append(_CaptureFile(path, len(data), _line.decode(data)))
        self._swept()

    def _note_failure(self, why: str) -> None:
        # A failure is logged once, not for each request: a full disk affects all of them.
        if not self._is_failing:
            log.warning("requests cannot be captured in %s: %s", self._folder, why)
        self._is_failing = True

    def _find(self, request_id: str) -> CapturedRequest | None:
        for kept in reversed(self._swept()):
            if kept.line.id == request_id:
                with suppress(OSError, msgspec.DecodeError):
                    return _whole.decode(kept.path.read_bytes())
        return None

    def _clear(self) -> int:
        kept = self._load()
        count = len(kept)
        self._delete(kept, count)
        return count

    def _swept(self) -> list[_CaptureFile]:
        """Delete captures that exceed the limits, and return those that are left."""
        most = self._settings().capture
        kept = self._load()
        oldest = self._now() - self.age_s
        total = sum(one.size for one in kept)
        count = 0
        while count < len(kept) and (
            len(kept) - count > most or total > self.bytes_max or kept[count].line.at < oldest
        ):
            total -= kept[count].size
            count += 1
        self._delete(kept, count)
        return kept

    def _delete(self, kept: list[_CaptureFile], count: int) -> None:
        for one in kept[:count]:
            with suppress(OSError):
                one.path.unlink(missing_ok=True)
        del kept[:count]

    def _load(self) -> list[_CaptureFile]:
        if self._ring is None:
            self._ring = []
            for path in sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ():
                try:
                    data = path.read_bytes()
                    self._ring.append(_CaptureFile(path, len(data), _line.decode(data)))
                except (OSError, msgspec.DecodeError):
                    # Files that are no captures are deleted. One may be a partial file that a power cut has left.
                    with suppress(OSError):
                        path.unlink(missing_ok=True)
            if self._ring:
                self._now.resume(max(one.line.at for one in self._ring))
        return self._ring


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
