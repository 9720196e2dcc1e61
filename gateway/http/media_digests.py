"""Replaces long runs of base64 in a body by their decoded size and the digest of the decoded bytes.

A body is filtered in pieces. Logs and caches identify a request's media by the same digest.
"""

import binascii
import hashlib
import re
from typing import Final

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
