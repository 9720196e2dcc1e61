"""Stop strings in generated text: no part of a stop string is ever emitted, regardless of how the text is split.

Text that UTF-8 can encode.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final


def encodable(text: str) -> str:
    """Return `text` with a question mark for each lone surrogate, which UTF-8 cannot encode.

    `json.loads` returns a lone surrogate for `"\\ud800"`, so names and messages that quote a client or a model may
    contain some.
    """
    return text if text.isascii() else text.encode(errors="replace").decode()


# Maximum number of stop strings with a cached table; several requests with the maximum of stop strings need fewer.
_MAX_CACHED: Final = 256


# A special token without text is scanned as a mark: a lone surrogate, which no text contains.
_FIRST_MARK: Final = 0xD800
_MARKS_MAX: Final = 0x800
_MARKS: Final = re.compile("[\ud800-\udfff]")


def marks_of(stops: Sequence[str], hidden: Mapping[str, int]) -> dict[str, str]:
    """Return marks of the special tokens that stop strings name, by the tokens' names.

    `hidden` has the names and ids of the special tokens that have no text.
    """
    if not stops:
        return {}
    named = [name for name in hidden if name and any(name in stop for stop in stops)]
    # A name may contain a shorter one.
    named.sort(key=len, reverse=True)
    return {name: chr(_FIRST_MARK + at) for at, name in enumerate(named[:_MARKS_MAX])}


def without_marks(text: str) -> str:
    return _MARKS.sub("", text)


class StopScanner:
    """Scanner that holds text back while the text may be the beginning of a stop string.

    The first complete match ends the text; of matches that are complete at the same character, the longest counts. The
    result is the same as with one character at a time, so the answer does not depend on the split. Each character is
    compared once per stop string.
    """

    __slots__ = ("_held", "_is_inclusive", "_patterns", "_starts", "hit")

    def __init__(
        self, stops: tuple[str, ...], marks: Mapping[str, str] | None = None, *, is_inclusive: bool = False
    ) -> None:
        """`marks` are characters of the scanned text that stand for names within stop strings. `is_inclusive` also
        emits the stop string.
        """
        self._is_inclusive = is_inclusive
        # Stop string that ended the text; empty until one does.
        self.hit = ""
        scanned = {_marked(stop, marks or {}): stop for stop in stops} | {stop: stop for stop in stops}
        self._patterns = [_Pattern(text, stop) for text, stop in scanned.items() if text]
        self._starts = {pattern.text[0] for pattern in self._patterns}
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take new text; return (text that is safe to emit, whether a stop string was hit)."""
        if not self._held and self._starts.isdisjoint(text):
            return text, False
        held = self._held + text
        for at, char in enumerate(text, len(self._held) + 1):
            complete = [pattern for pattern in self._patterns if pattern.advance(char)]
            if complete:
                longest = max(complete, key=lambda pattern: len(pattern.text))
                self._held, self.hit = "", longest.stop
                return held[: at - len(longest.text)] + (self.hit if self._is_inclusive else ""), True
        cut = len(held) - max((pattern.matched for pattern in self._patterns), default=0)
        self._held = held[cut:]
        return held[:cut], False

    def flush(self) -> str:
        """Return the held text after the sequence has ended for another reason."""
        held, self._held = self._held, ""
        return held


def _marked(stop: str, marks: Mapping[str, str]) -> str:
    for name, mark in marks.items():
        stop = stop.replace(name, mark)
    return stop


class _Pattern:
    """Stop string, its form in scanned text, and the length of the prefix of this form that the text so far ends with
    (Knuth, Morris, Pratt 1977).
    """

    __slots__ = ("_fallback", "matched", "stop", "text")

    def __init__(self, text: str, stop: str) -> None:
        self.text = text
        self.stop = stop
        self.matched = 0
        self._fallback = _fallback(text)

    def advance(self, char: str) -> bool:
        """Process one character; return True if the stop string is complete."""
        matched = self.matched
        while matched and (matched == len(self.text) or self.text[matched] != char):
            matched = self._fallback[matched]
        if self.text[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(self.text)


@lru_cache(maxsize=_MAX_CACHED)
def _fallback(stop: str) -> "array[int]":
    """Return, for each matched length, the next shorter length that also matches. All choices of a request share the
    table.
    """
    table = array("i", [0]) * (len(stop) + 1)
    matched = 0
    for size in range(1, len(stop)):
        char = stop[size]
        while matched and stop[matched] != char:
            matched = table[matched]
        if stop[matched] == char:
            matched += 1
        table[size + 1] = matched
    return table
