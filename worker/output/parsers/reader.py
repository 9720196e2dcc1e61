"""Text that arrives in pieces, read by grammars written as generators.

A grammar is a generator that yields when it needs more input, so it reads like a parser over the whole text. Every
primitive waits until its answer can no longer change, which is why any split of the input gives the same result.
A primitive consumes what it has decided on, so the buffer stays as short as the longest marker.
"""

import re
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from worker.output.parsers.controls import NO_CONTROLS, Controls

T = TypeVar("T")
Steps = Generator[None, None, T]
Emit = Callable[[str], None]

_NOT_SPACE = re.compile(r"\S")


class Malformed(Exception):
    """The text does not follow the grammar, or ends inside of it. Never leaves the package."""


class Unclosed(Malformed):
    """Every value so far is whole: nothing but what closes them may be missing."""


def stray(char: str) -> Malformed:
    """For `char` where only a bracket or a comma may follow; at the end and before markup, it is the bracket."""
    return Unclosed() if char in ("", "<") else Malformed()


class MarkerSet:
    """A set of strings to look for; `prefixes` are those that may still become one of them."""

    __slots__ = ("first", "longest", "pattern", "prefixes", "words")

    def __init__(self, words: Iterable[str]) -> None:
        self.words = tuple(sorted({word for word in words if word}, key=len, reverse=True))
        self.pattern = re.compile("|".join(map(re.escape, self.words)) or r"(?!)")
        self.prefixes = frozenset(word[:n] for word in self.words for n in range(1, len(word)))
        self.first = frozenset(word[0] for word in self.words)
        self.longest = len(self.words[0]) if self.words else 0

    def held(self, text: str, start: int) -> int:
        """Start of the longest suffix of `text` that may still become a marker."""
        at = max(start, len(text) - self.longest + 1)
        if self.first.isdisjoint(text[at:]):
            return len(text)
        while at < len(text) and text[at:] not in self.prefixes:
            at += 1
        return at


def collected(read: Callable[[Emit], Steps[object]]) -> Steps[str]:
    """Everything that `read` emits, as one string."""
    parts: list[str] = []
    yield from read(parts.append)
    return "".join(parts)


@lru_cache(maxsize=512)
def markers(*words: str) -> MarkerSet:
    """The same set is compiled once."""
    return MarkerSet(words)


class MarkupReader:
    """The text that is not consumed yet. `trace` keeps what was, for as long as a call may still degrade to text.

    `is_cut`: it has ended where the model would have gone on. A marker with tokens of `controls` in it is only found
    where those were written.
    """

    __slots__ = ("_base", "_written", "at", "buf", "controls", "ended", "is_cut", "trace")

    def __init__(self, controls: Controls = NO_CONTROLS) -> None:
        self.controls = controls
        # Where in the whole text `buf` begins, and control tokens do.
        self._base = 0
        self._written: set[int] = set()
        self.buf = ""
        self.at = 0
        self.ended = False
        self.is_cut = False
        self.trace: list[str] | None = None

    def note_control(self, at: int) -> None:
        """A control token begins at this character of the whole text."""
        self._written.add(at)

    def push(self, text: str) -> None:
        self._base += self.at
        self.buf = self.buf[self.at :] + text if self.at < len(self.buf) else text
        self.at = 0

    def take(self, size: int) -> str:
        """Consume `size` characters that are known to be there."""
        text = self.buf[self.at : self.at + size]
        self.at += size
        if self.trace is not None:
            self.trace.append(text)
        return text

    def untrace(self) -> str:
        """Stop recording; returns what was consumed since it began."""
        text, self.trace = "".join(self.trace or ()), None
        return text

    def peek(self, size: int = 1) -> Steps[str]:
        """The next `size` characters, fewer only at the end of the text. Consumes nothing."""
        while len(self.buf) - self.at < size and not self.ended:
            yield
        return self.buf[self.at : self.at + size]

    def space(self) -> Steps[str]:
        """Consume white space, if any; returns the character after it, "" at the end of the text."""
        while True:
            match = _NOT_SPACE.search(self.buf, self.at)
            self.take((match.start() if match else len(self.buf)) - self.at)
            if match:
                return match[0]
            if self.ended:
                return ""
            yield

    def literal(self, words: MarkerSet) -> Steps[str]:
        """Consume the longest of `words` if the text goes on with one; else "" and nothing is consumed."""
        while True:
            rest = self.buf[self.at : self.at + words.longest]
            if (not rest or rest in words.prefixes) and not self.ended:
                yield
                continue
            match = words.pattern.match(self.buf, self.at)
            word = self._genuine(words, match) if match else ""
            return self.take(len(word)) if word else ""

    def until(self, words: MarkerSet, emit: Emit, limit: int = -1, keep: bool = False) -> Steps[str]:
        """Give all text before the first of `words` to `emit`, as it comes, and consume that word unless `keep`.

        Returns the word, or "" at the end of the text or, with `limit`, when more text than that comes before a word;
        then exactly `limit` characters are consumed, so that the split of the input does not show.
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
        """Position of the first of `words`, and the word."""
        match = words.pattern.search(self.buf, self.at)
        while match:
            if word := self._genuine(words, match):
                return match.start(), word
            match = words.pattern.search(self.buf, match.start() + 1)
        return 0, ""

    def _genuine(self, words: MarkerSet, found: re.Match[str]) -> str:
        """The longest of `words` at this place whose control tokens were written as such."""
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
        """The text before the first of `words` and that word. Raises `Malformed` when there is none within `limit`."""
        parts: list[str] = []
        hit = yield from self.until(words, parts.append, limit, keep)
        if not hit:
            raise Malformed
        return "".join(parts), hit

    def expect(self, words: MarkerSet) -> Steps[str]:
        """Consume white space and one of `words`, or raise `Malformed`."""
        yield from self.space()
        hit = yield from self.literal(words)
        if not hit:
            raise Malformed
        return hit
