"""Stop strings in generated text: no part of a stop string is ever emitted, regardless of how the text is split."""

from array import array
from functools import lru_cache
from typing import Final

# Maximum number of stop strings with a cached table; several requests with the maximum of stop strings need fewer.
_MAX_CACHED: Final = 256


class StopScanner:
    """Scanner that holds text back while the text may be the beginning of a stop string.

    The first complete match ends the text; of matches that are complete at the same character, the longest counts. The
    result is the same as with one character at a time, so the answer does not depend on the split. Each character is
    compared once per stop string.
    """

    __slots__ = ("_held", "_is_inclusive", "_patterns", "_starts", "hit")

    def __init__(self, stops: tuple[str, ...], *, is_inclusive: bool = False) -> None:
        """`is_inclusive` also emits the stop string."""
        self._is_inclusive = is_inclusive
        # Stop string that ended the text; empty until one does.
        self.hit = ""
        self._patterns = [_Pattern(stop) for stop in stops if stop]
        self._starts = {pattern.stop[0] for pattern in self._patterns}
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Take new text; return (text that is safe to emit, whether a stop string was hit)."""
        if not self._held and self._starts.isdisjoint(text):
            return text, False
        held = self._held + text
        for at, char in enumerate(text, len(self._held) + 1):
            complete = [pattern.stop for pattern in self._patterns if pattern.advance(char)]
            if complete:
                self._held, self.hit = "", max(complete, key=len)
                return held[: at if self._is_inclusive else at - len(self.hit)], True
        cut = len(held) - max((pattern.matched for pattern in self._patterns), default=0)
        self._held = held[cut:]
        return held[:cut], False

    def flush(self) -> str:
        """Return the held text after the sequence has ended for another reason."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """Stop string, and the length of its prefix that the text so far ends with (Knuth, Morris, Pratt 1977)."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _fallback(stop)

    def advance(self, char: str) -> bool:
        """Process one character; return True if the stop string is complete."""
        matched = self.matched
        while matched and (matched == len(self.stop) or self.stop[matched] != char):
            matched = self._fallback[matched]
        if self.stop[matched] == char:
            matched += 1
        self.matched = matched
        return matched == len(self.stop)


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
