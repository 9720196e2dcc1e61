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

from worker.speculation.text_sources.indexed_text import BREAK, LEAST, REACH, IndexedTokens, Tokens

# Of outputs before, tokens that are kept for each salt, and salts: with its index, one takes half a megabyte, and any
# client may name salts.
HISTORY_TOKENS: Final = 1 << 14
HISTORY_SALTS: Final = 64
_KEPT_TOKENS: Final = HISTORY_TOKENS * 3 // 4
# Tokens of the prompt kept before an output, so that its beginning can be found.
_LEAD: Final = 8


class DraftSource(StrEnum):
    """Text or model that a draft is from."""

    LOOKUP = "lookup"
    PREDICTION = "prediction"
    HISTORY = "history"
    HEAD = "mtp"
    EAGLE = "eagle3"
    MODEL = "draft_model"
    BLOCK = "dflash"
    ASSISTANT = "assistant"
    GRAMMAR = "grammar"
    TREE = "tree"


@dataclass(slots=True, frozen=True)
class LookupGuess:
    """A draft, the text that it is from, and how many tokens before it matched."""

    tokens: list[int]
    source: DraftSource
    match: int


class Lookup:
    """One row's text: what its client predicts, then prompt and output so far."""

    def __init__(self, tokens: Tokens, prediction: Sequence[int]) -> None:
        self._predicted = len(prediction) + 1 if prediction else 0
        before = np.array([*prediction, BREAK] if prediction else [], dtype=np.int32)
        self._held = IndexedTokens(np.concatenate([before, tokens]) if prediction else tokens)

    def index(self, most: int) -> bool:
        """Make places of the text known, at most so many at once; whether all of them are."""
        self._held.index(most)
        return self._held.is_indexed

    @property
    def text(self) -> Tokens:
        """Prompt and output."""
        return self._held.tokens[self._predicted :]

    def extend(self, tokens: Sequence[int]) -> None:
        self._held.extend(list(tokens))

    def shorten(self) -> None:
        """Take the newest token back."""
        self._held.shorten()

    def guess(self, most: int, history: IndexedTokens) -> LookupGuess | None:
        """At most so many tokens that may follow: as many as matched before them."""
        tail = self.text[-REACH:]
        at, match = self._held.longest(tail)
        if at >= 0:
            source = DraftSource.PREDICTION if at < self._predicted else DraftSource.LOOKUP
            return _guess(self._held.tokens, at, match, most, source)
        at, match = history.longest(tail)
        return _guess(history.tokens, at, match, most, DraftSource.HISTORY) if at >= 0 else None


class OutputHistory:
    """Outputs of the requests that have ended, each salt's apart: no tenant learns of another's by its speed."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, IndexedTokens] = OrderedDict()
        self._none = IndexedTokens(np.empty(0, dtype=np.int32))

    def of(self, salt: str) -> IndexedTokens:
        return self._held.get(salt, self._none)

    def add(self, salt: str, text: Tokens, output: int) -> None:
        """Keep the last `output` tokens of a text."""
        if output < LEAST:
            return
        tail = text[-(output + _LEAD) :][-HISTORY_TOKENS // 2 :]
        held = self._held.pop(salt, None) or IndexedTokens(self._none.tokens)
        held.extend([BREAK])
        held.extend(tail)
        if len(held) > HISTORY_TOKENS:  # a part goes at once, for what is left is indexed again
            held = IndexedTokens(held.tokens[-_KEPT_TOKENS:])
        self._held[salt] = held
        if len(self._held) > HISTORY_SALTS:
            self._held.popitem(last=False)


def _guess(held: Tokens, at: int, match: int, most: int, source: DraftSource) -> LookupGuess | None:
    count = min(most, match)
    # A copy may run into what it is writing.
    period = len(held) - 1 - at
    tokens = [int(held[at + 1 + step % period]) for step in range(count)]
    if BREAK in tokens:
        tokens = tokens[: tokens.index(BREAK)]
    return LookupGuess(tokens, source, match) if tokens else None
