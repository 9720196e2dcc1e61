"""Lookup drafts: the tokens after the longest earlier match of a row's newest tokens.

Models often repeat text of a prompt that they edit, of their own output, of the client's prediction, or of answers to
earlier requests. A search needs no model and little memory.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from worker.speculation.text_sources.indexed_text import (
    BREAK,
    MAX_MATCH_TOKENS,
    MIN_MATCH_TOKENS,
    IndexedTokens,
    Tokens,
)

# Maximum number of earlier output tokens that are kept per salt.
HISTORY_TOKENS: Final = 1 << 14
# Maximum number of salts. Clients choose salts freely, and each salt takes half a megabyte with its index.
HISTORY_SALTS: Final = 64
# Number of tokens that remain when a full history is cut. Cuts are rare, because the remaining tokens must be indexed
# again.
_CUT_HISTORY_TOKENS: Final = HISTORY_TOKENS * 3 // 4
# Number of prompt tokens that are kept before an output, so that the output's beginning can be found.
_PROMPT_TAIL_TOKENS: Final = 8


class DraftSource(StrEnum):
    """Source of a draft: a text or a model."""

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
    """Draft with its source, and the number of matching tokens before it."""

    tokens: list[int]
    source: DraftSource
    match: int


class Lookup(IndexedTokens):
    """Indexed text of one row: the prompt and the output so far, and beside them the client's prediction."""

    def __init__(self, tokens: Tokens, prediction: Sequence[int]) -> None:
        super().__init__(tokens)
        self._prediction = IndexedTokens(np.array(prediction, dtype=np.int32)) if prediction else None

    @property
    def text(self) -> Tokens:
        """Return the prompt and the output so far."""
        return self.tokens

    def guess(self, most: int, history: IndexedTokens) -> LookupGuess | None:
        """Return a draft of at most `most` tokens that is no longer than the match before it; None without a match.

        A prediction that matches as far as the row's own text goes before it: an edit's prompt usually has the same
        text, and the client states what will follow.
        """
        tail = self.tokens[-MAX_MATCH_TOKENS:]
        at, match = self.longest(tail)
        if self._prediction is not None:
            predicted, length = self._prediction.longest(tail)
            if predicted >= 0 and length >= match:
                return _guess(self._prediction.tokens, predicted, length, most, DraftSource.PREDICTION, repeats=False)
        if at >= 0:
            return _guess(self.tokens, at, match, most, DraftSource.LOOKUP)
        at, match = history.longest(tail)
        return _guess(history.tokens, at, match, most, DraftSource.HISTORY) if at >= 0 else None


class OutputHistory:
    """Outputs of ended requests, separate for each salt, so that timing reveals nothing about other tenants."""

    def __init__(self) -> None:
        self._held: OrderedDict[str, IndexedTokens] = OrderedDict()
        self._none = IndexedTokens(np.empty(0, dtype=np.int32))

    def of(self, salt: str) -> IndexedTokens:
        return self._held.get(salt, self._none)

    def add(self, salt: str, text: Tokens, output: int) -> None:
        """Add the last `output` tokens of a text to the history of a salt."""
        if output < MIN_MATCH_TOKENS:
            return
        tail = text[-(output + _PROMPT_TAIL_TOKENS) :][-HISTORY_TOKENS // 2 :]
        held = self._held.pop(salt, None) or IndexedTokens(self._none.tokens)
        held.extend([BREAK])
        held.extend(tail)
        if len(held) > HISTORY_TOKENS:
            held = IndexedTokens(held.tokens[-_CUT_HISTORY_TOKENS:])
        self._held[salt] = held
        if len(self._held) > HISTORY_SALTS:
            self._held.popitem(last=False)


def _guess(
    held: Tokens, at: int, match: int, most: int, source: DraftSource, *, repeats: bool = True
) -> LookupGuess | None:
    """Return what follows a place. If it `repeats`, a draft that would extend beyond the end of the text starts again
    with its own beginning.
    """
    count = min(most, match if repeats else min(match, len(held) - 1 - at))
    period = len(held) - 1 - at
    tokens = [int(held[at + 1 + step % period]) for step in range(count)]
    if BREAK in tokens:
        tokens = tokens[: tokens.index(BREAK)]
    return LookupGuess(tokens, source, match) if tokens else None
