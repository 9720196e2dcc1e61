"""Incremental reader of text for grammars that are written as generators.

A grammar is a generator that yields when it needs more input, so it reads like a parser over the whole text. Every
primitive waits until its result can no longer change, which is why any split of the input gives the same result. A
primitive consumes the text that it has decided on, so the buffer stays as short as the longest marker.

Control tokens: markup that a tokenizer encodes as single tokens. The same spelling in ordinary tokens is text.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import lru_cache
from typing import Final, TypeVar


class Controls:
    """Control tokens of one vocabulary that occur in markup. Frozen, and shared by all parsers of the model.

    `tokens` maps their texts to whether the tokenizer marks them as special. If it is empty, parsers go by the text
    only.
    """

    __slots__ = ("_found", "_pattern", "_tokens")

    def __init__(self, tokens: Mapping[str, bool]) -> None:
        self._tokens = dict(tokens)
        self._pattern = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
        self._found: dict[str, tuple[int, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def offsets(self, marker: str) -> tuple[int, ...]:
        """Return the offsets at which control tokens begin in `marker`."""
        offsets = self._found.get(marker)
        if offsets is None:
            offsets = self._found[marker] = tuple(hit.start() for hit in self._pattern.finditer(marker))
        return offsets

    def are_special(self, marker: str) -> bool:
        """Return whether `marker` contains control tokens and all of them are special, so that the marker cannot be
        text.
        """
        hits = self._pattern.findall(marker)
        return bool(hits) and all(self._tokens[hit] for hit in hits)


NO_CONTROLS: Final = Controls({})


def is_markup(content: str, is_special: bool) -> bool:
    """Return whether an added token of a vocabulary can be a part of markup; some added tokens are indentation or
    words.
    """
    return len(content) > 2 and not content.isspace() and (is_special or content[0] in "<[|｜◁]")


T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

_NOT_SPACE = re.compile(r"\S")
# Maximum number of characters of a marker that is written again, and the whitespace before it.
REPEAT_LIMIT: Final = 128


class Malformed(Exception):
    """Raised for text that does not match the grammar, or ends within it. Never raised outside the package."""


class Unclosed(Malformed):
    """Raised when only closing brackets may be missing: every value so far is complete."""


def stray(char: str) -> Malformed:
    """Return the error for `char` in place of a bracket or comma; at the end or before markup, a bracket is missing."""
    return Unclosed() if char in ("", "<") else Malformed()


class MarkerSet:
    """Set of strings to search for; `prefixes` are the texts that may still become one of these strings."""

    __slots__ = ("first", "longest", "pattern", "prefixes", "words")

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(sorted({word for word in words if word}, key=len, reverse=True))
        self.pattern = re.compile("|".join(map(re.escape, self.words)) or r"(?!)")
        self.prefixes = frozenset(word[:n] for word in self.words for n in range(1, len(word)))
        self.first = frozenset(word[0] for word in self.words)
        self.longest = len(self.words[0]) if self.words else 0

    def held(self, text: str, start: int) -> int:
        """Return the start of the longest suffix of `text` that may still become a marker."""
        at = max(start, len(text) - self.longest + 1)
        if self.first.isdisjoint(text[at:]):
            return len(text)
        while at < len(text) and text[at:] not in self.prefixes:
            at += 1
        return at


def collected(read: Callable[[Emit], Steps[object]]) -> Steps[str]:
    """Return all texts that `read` emits, as one string."""
    parts: list[str] = []
    yield from read(parts.append)
    return "".join(parts)


@lru_cache(maxsize=512)
def markers(*words: str) -> MarkerSet:
    """Return the marker set of these words, compiled once."""
    return MarkerSet(words)


class MarkupReader:
    """Reader of the text that is not consumed yet.

    `trace` records consumed text while a call may still turn out to be text. `is_cut` means that the text ended
    although the model would have continued. A marker that contains tokens of `controls` is only found where these
    tokens were generated.
    """

    __slots__ = ("_base", "_kept_from", "_written", "at", "buf", "controls", "ended", "is_cut", "trace")

    def __init__(self, controls: Controls = NO_CONTROLS) -> None:
        self.controls = controls
        # Offset of `buf` in the whole text.
        self._base = 0
        # Offsets of control tokens in the whole text.
        self._written: set[int] = set()
        # Offset in the whole text from which a lookahead keeps the text; None outside of lookaheads.
        self._kept_from: int | None = None
        self.buf = ""
        self.at = 0
        self.ended = False
        self.is_cut = False
        self.trace: list[str] | None = None

    def note_control(self, at: int) -> None:
        """Record that a control token begins at this character of the whole text."""
        self._written.add(at)

    @property
    def position(self) -> int:
        """Offset of the text that is not consumed yet, in the whole text."""
        return self._base + self.at

    def push(self, text: str) -> None:
        start = self.at if self._kept_from is None else self._kept_from - self._base
        self._base += start
        self.at -= start
        self.buf = self.buf[start:] + text if start < len(self.buf) else text

    def ahead(self, read: Steps[T], limit: int) -> Steps[T | None]:
        """Return what `read` returns, and consume nothing; None if it raises `Malformed` or reads more than `limit`
        characters.
        """
        start, kept_from, trace = self.position, self._kept_from, self.trace
        self._kept_from, self.trace = start if kept_from is None else kept_from, None
        try:
            while self.position - start <= limit:
                try:
                    next(read)
                except StopIteration as stop:
                    return stop.value if self.position - start <= limit else None
                except Malformed:
                    return None
                # `read` only moves forward, so the limit is exceeded by every split of the text or by none.
                if self.position - start <= limit:
                    yield
            return None
        finally:
            self.at = start - self._base
            self._kept_from, self.trace = kept_from, trace

    def take(self, size: int) -> str:
        """Consume `size` characters that are known to be available."""
        text = self.buf[self.at : self.at + size]
        self.at += size
        if self.trace is not None:
            self.trace.append(text)
        return text

    def untrace(self) -> str:
        """Stop recording and return the text consumed since the recording began."""
        text, self.trace = "".join(self.trace or ()), None
        return text

    def peek(self, size: int = 1) -> Steps[str]:
        """Return the next `size` characters, or all remaining ones if the text ends before. Consumes nothing."""
        while len(self.buf) - self.at < size and not self.ended:
            yield
        return self.buf[self.at : self.at + size]

    def space(self) -> Steps[str]:
        """Consume whitespace, if any; return the character after it, "" at the end of the text."""
        while True:
            match = _NOT_SPACE.search(self.buf, self.at)
            self.take((match.start() if match else len(self.buf)) - self.at)
            if match:
                return match[0]
            if self.ended:
                return ""
            yield

    def literal(self, words: MarkerSet) -> Steps[str]:
        """Consume and return the longest of `words` that comes next; otherwise return "" and consume nothing."""
        while True:
            rest = self.buf[self.at : self.at + words.longest]
            if (not rest or rest in words.prefixes) and words.words and not self.ended:
                yield
                continue
            match = words.pattern.match(self.buf, self.at)
            word = self._genuine(words, match) if match else ""
            return self.take(len(word)) if word else ""

    def again(self, words: MarkerSet) -> Steps[None]:
        """Consume further copies of a marker that was just consumed, and the whitespace before them."""
        while (yield from self.ahead(self.expect(words), REPEAT_LIMIT)):
            yield from self.expect(words)

    def until(self, words: MarkerSet, emit: Emit, limit: int = -1, keep: bool = False) -> Steps[str]:
        """Emit all text before the first of `words` as it arrives, and consume that word unless `keep`.

        Return the word, or "" at the end of the text, or if more than `limit` characters precede a word. In the last
        case exactly `limit` characters are consumed, so that the result does not depend on the split of the input.
        """
        while True:
            end, word = self._find(words)
            if not word:
                end = len(self.buf) if self.ended else words.held(self.buf, self.at)
            if limit >= 0:
                if end - self.at > limit:
                    emit(self.take(limit))
                    return ""
                limit -= end - self.at
            if end > self.at:
                emit(self.take(end - self.at))
            if word and (self.ended or self.buf[end : end + words.longest] not in words.prefixes):
                return word if keep else self.take(len(word))
            if self.ended and not word:
                return ""
            yield

    def _find(self, words: MarkerSet) -> tuple[int, str]:
        """Return the position of the first of `words` in the buffer, and the word."""
        match = words.pattern.search(self.buf, self.at)
        while match:
            if word := self._genuine(words, match):
                return match.start(), word
            match = words.pattern.search(self.buf, match.start() + 1)
        return 0, ""

    def _genuine(self, words: MarkerSet, found: re.Match[str]) -> str:
        """Return the longest of `words` that starts where the match starts. A word with control tokens counts only if
        the model generated these as tokens, not as text.
        """
        if not self.controls:
            return found[0]
        start = found.start()
        for word in words.words:
            if self.buf.startswith(word, start) and all(
                self._base + start + at in self._written for at in self.controls.offsets(word)
            ):
                return word
        return ""

    def capture(self, words: MarkerSet, limit: int = 1024, keep: bool = False) -> Steps[tuple[str, str]]:
        """Return the text before the first of `words`, and that word. Raises `Malformed` if none is within `limit`."""
        parts: list[str] = []
        hit = yield from self.until(words, parts.append, limit, keep)
        if not hit:
            raise Malformed
        return "".join(parts), hit

    def expect(self, words: MarkerSet) -> Steps[str]:
        """Consume whitespace and one of `words`, or raise `Malformed`."""
        yield from self.space()
        hit = yield from self.literal(words)
        if not hit:
            raise Malformed
        return hit
