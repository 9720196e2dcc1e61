"""Decoder of the text of a free-form tool call, read from the JSON arguments `{"input": "…"}` while they
are generated.
"""

import json
import re
from typing import Final

from gateway.api.responses.tools import INPUT

# Matches the JSON before the value of `input`. Arguments of another shape are parsed once they are complete.
_HEAD: Final = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
# Matches a run of plain characters, an escape, or a surrogate pair of escapes.
_PIECE: Final = re.compile(
    r'[^"\\]+|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\[^u]|\\u'
)
# Matches an incomplete escape or surrogate pair at the end of the JSON so far.
_CUT: Final = re.compile(r"\\(u[0-9a-fA-F]{0,3})?$|\\u[dD][89abAB][0-9a-fA-F]{2}(\\(u[0-9a-fA-F]{0,3})?)?$")
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f"}


class InputReader:
    """Incremental decoder. It takes pieces of JSON and returns pieces of text, which never change later."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._parts: list[str] = []
        self._pending = ""
        self._is_inside = False
        self._is_over = False

    @property
    def value(self) -> str:
        """Text that was returned so far."""
        return "".join(self._parts)

    def feed(self, text: str) -> str:
        """Take a piece of the arguments and return the text that it adds."""
        self._raw.append(text)
        if self._is_over:
            return ""
        self._pending += text
        if not self._is_inside:
            head = _HEAD.match(self._pending)
            if head is None:
                return ""
            self._is_inside = True
            self._pending = self._pending[head.end() :]
        return self._emit(self._read(is_end=False))

    def finish(self) -> str:
        """Return the rest of the text. If the arguments have another shape, that is the whole text."""
        if self._is_over:
            return ""
        if self._is_inside:
            return self._emit(self._read(is_end=True))
        self._is_over = True
        return self._emit(_salvage("".join(self._raw)))

    def _emit(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    def _read(self, is_end: bool) -> str:
        """Decode up to the closing quote, or up to an incomplete escape."""
        pending = self._pending
        cut = None if is_end else _CUT.search(pending)
        limit = len(pending) if cut is None else cut.start()
        decoded: list[str] = []
        position = 0
        while position < limit:
            if pending[position] == '"':
                self._is_over = True
                break
            piece = _PIECE.match(pending, position)
            if piece is None:  # What remains is a lone backslash, with which the input ends.
                break
            decoded.append(_decode(piece.group()))
            position = piece.end()
        self._pending = pending[position:]
        return "".join(decoded)


def _decode(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    if piece[1] != "u":
        # An invalid escape is kept unchanged.
        return _ESCAPES.get(piece[1]) or (piece[1] if piece[1] in '"\\/' else piece)
    if len(piece) < 6:
        return piece
    units = [int(unit, 16) for unit in piece.split("\\u")[1:]]
    return b"".join(unit.to_bytes(2, "big") for unit in units).decode("utf-16-be", "replace")


def _salvage(raw: str) -> str:
    """Return the text of arguments of another shape: the only string in them, or all of them unchanged."""
    try:
        arguments = json.loads(raw, strict=False)
    except (ValueError, RecursionError):
        return raw
    if isinstance(arguments, dict):
        if isinstance(arguments.get(INPUT), str):
            return _encodable(arguments[INPUT])
        texts = [value for value in arguments.values() if isinstance(value, str)]
        if len(texts) == 1 and len(arguments) == 1:
            return _encodable(texts[0])
    return _encodable(arguments) if isinstance(arguments, str) else raw


def _encodable(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
