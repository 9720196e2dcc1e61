"""Lookup: the text behind the newest tokens' longest match in what is known already.

What a model writes often stands before: in the prompt that it edits, in its own output, in what the client predicts, or
in the answers to requests before. Finding it needs no model and no memory to speak of.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from worker.speculation.drafter import Tokens

# Shorter matches say too little.
LEAST: Final = 3
# A match is followed back so far: longer ones are no surer.
REACH: Final = 32
# Of the places that match, the newest ones are compared.
_TRIES: Final = 16
# Of outputs before, tokens that are kept for each salt, and salts.
HISTORY_TOKENS: Final = 1 << 14
HISTORY_SALTS: Final = 256
# Tokens of the prompt kept before an output, so that its beginning can be found.
_LEAD: Final = 8
# Stands where a text ends or is not to be drafted from: no draft reaches over it.
BREAK: Final = -1


class Source(StrEnum):
    """Text that a draft is from."""

    LOOKUP = "lookup"
    PREDICTION = "prediction"
    HISTORY = "history"


@dataclass(slots=True, frozen=True)
class Guess:
    """A draft, the text that it is from, and how many tokens before it matched."""

    tokens: list[int]
    source: Source
    match: int


class Lookup:
    """One row's text: what its client predicts, then prompt and output so far."""

    def __init__(self, tokens: Tokens, prediction: Sequence[int]) -> None:
        self._predicted = len(prediction) + 1 if prediction else 0
        self._end = self._predicted + len(tokens)
        self._held = np.empty(self._end + 1024, dtype=np.int32)
        if prediction:
            self._held[: self._predicted] = [*prediction, BREAK]
        self._held[self._predicted : self._end] = tokens

    @property
    def text(self) -> Tokens:
        """Prompt and output."""
        return self._held[self._predicted : self._end]

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._end + len(tokens)
        if end > len(self._held):
            self._held = np.concatenate([self._held, np.empty(end, dtype=np.int32)])
        self._held[self._end : end] = tokens
        self._end = end

    def shorten(self) -> None:
        """Take the newest token back."""
        self._end -= 1

    def guess(self, most: int, history: Tokens) -> Guess | None:
        """At most so many tokens that may follow: as many as matched before them."""
        held = self._held[: self._end]
        at, match = _longest(held, self.text)
        if at >= 0:
            source = Source.PREDICTION if at < self._predicted else Source.LOOKUP
            return _guess(held, at, match, most, source)
        at, match = _longest(history, self.text)
        return _guess(history, at, match, most, Source.HISTORY) if at >= 0 else None


class History:
    """Outputs of the requests that have ended, each salt's apart: no tenant learns of another's by its speed."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, Tokens] = OrderedDict()
        self._none = np.empty(0, dtype=np.int32)

    def of(self, salt: str) -> Tokens:
        return self._held.get(salt, self._none)

    def add(self, salt: str, text: Tokens, output: int) -> None:
        """Keep the last `output` tokens of a text."""
        if output < LEAST:
            return
        tail = text[-(output + _LEAD) :][-HISTORY_TOKENS // 2 :]
        held = np.concatenate([self._held.pop(salt, self._none), np.array([BREAK], dtype=np.int32), tail])
        self._held[salt] = held[-HISTORY_TOKENS:]
        if len(self._held) > HISTORY_SALTS:
            self._held.popitem(last=False)


def _longest(held: Tokens, text: Tokens) -> tuple[int, int]:
    """End and length of the longest match in `held` of the end of `text`, behind which there is more; -1 for none."""
    if len(text) < LEAST or len(held) <= LEAST:
        return -1, 0
    tail = text[-REACH:]
    ends = np.flatnonzero(held[LEAST - 1 : -1] == tail[-1]) + LEAST - 1
    for back in range(1, LEAST):
        ends = ends[held[ends - back] == tail[-1 - back]]
    best, at = 0, -1
    for end in ends[: -_TRIES - 1 : -1].tolist():
        size = min(len(tail), end + 1)
        differs = held[end - size + 1 : end + 1][::-1] != tail[::-1][:size]
        length = int(differs.argmax()) if differs.any() else size
        if length > best and held[end + 1] != BREAK:
            best, at = length, end
    return at, best


def _guess(held: Tokens, at: int, match: int, most: int, source: Source) -> Guess | None:
    count = min(most, match)
    # A copy may run into what it is writing.
    period = len(held) - 1 - at
    tokens = [int(held[at + 1 + step % period]) for step in range(count)]
    if BREAK in tokens:
        tokens = tokens[: tokens.index(BREAK)]
    return Guess(tokens, source, match) if tokens else None
