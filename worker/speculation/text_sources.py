"""Drafts from text: n-gram lookup in prompts and outputs.

Token text with an index, which finds earlier occurrences of the newest tokens in constant time.

Lookup drafts: the tokens after the longest earlier match of a row's newest tokens.

Models often repeat text of a prompt that they edit, of their own output, of the client's prediction, or of answers to
earlier requests. A search needs no model and little memory.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

# Minimum length of a match: shorter matches are rarely right, and longer ones are not right more often.
MIN_MATCH_TOKENS: Final = 3
MAX_MATCH_TOKENS: Final = 32
# Separator of texts. It also replaces tokens that must not be drafted, because no draft extends over it.
BREAK: Final = -1
# Maximum number of matches that a search compares.
_MAX_COMPARED: Final = 16
# Maximum number of places with the same hash that a search visits.
_MAX_VISITED: Final = 64
# Maximum number of places that one search adds to the index: indexing a whole long text would take as long as several
# steps.
_SEARCH_INDEX_TOKENS: Final = 4096
# Up to this many places are indexed in a loop, because NumPy's vectors are slower for so few.
_MAX_LOOPED_PLACES: Final = 16
# Multipliers of xxHash32.
_PRIMES: Final = (2654435761, 2246822519, 3266489917)
_MASK: Final = (1 << 32) - 1
_SPARE_TOKENS: Final = 1024


class IndexedTokens:
    """Growing sequence of tokens, with hash chains over runs of `MIN_MATCH_TOKENS`, as in zlib.

    A place is the index of a run's last token. Each place links to the preceding place with the same hash.
    """

    def __init__(self, tokens: Tokens) -> None:
        self._end = len(tokens)
        self._held = np.empty(self._end + _SPARE_TOKENS, dtype=np.int32)
        self._held[: self._end] = tokens
        self._heads = np.empty(0, dtype=np.int32)
        self._before = np.empty(0, dtype=np.int32)
        # All places before this one are in the chains.
        self._indexed = MIN_MATCH_TOKENS - 1
        self._shift = 32

    def __len__(self) -> int:
        return self._end

    @property
    def tokens(self) -> Tokens:
        return self._held[: self._end]

    def extend(self, tokens: Tokens | Sequence[int]) -> None:
        end = self._end + len(tokens)
        if end > len(self._held):
            self._held = np.concatenate([self._held, np.empty(end, dtype=np.int32)])
        self._held[self._end : end] = tokens
        self._end = end

    def shorten(self) -> None:
        """Remove the newest token."""
        self._end -= 1

    def longest(self, tail: Tokens) -> tuple[int, int]:
        """Return the place and length of the longest match for the end of `tail`; a match must be followed by more
        tokens.

        The place is -1 if there is no match.
        """
        if len(tail) < MIN_MATCH_TOKENS or self._end <= MIN_MATCH_TOKENS:
            return -1, 0
        self.index(_SEARCH_INDEX_TOKENS)
        tail = tail[-MAX_MATCH_TOKENS:][::-1]
        first, second, third = tail[:MIN_MATCH_TOKENS].tolist()
        held, last = self._held, self._end - 1
        at, steps, tries = int(self._heads[self._bucket(third, second, first)]), _MAX_VISITED, _MAX_COMPARED
        best, place = 0, -1
        while at >= 0 and steps and tries:
            steps -= 1
            if at < last and held[at] == first and held[at - 1] == second and held[at - 2] == third:
                tries -= 1
                length = self._match(at, tail)
                if length > best and held[at + 1] != BREAK:
                    best, place = length, at
            at = int(self._before[at])
        return place, best

    def _match(self, at: int, tail: Tokens) -> int:
        """Return the length of the match that ends at a place, given the reversed tail."""
        size = min(len(tail), at + 1)
        differs = self._held[at - size + 1 : at + 1][::-1] != tail[:size]
        length = int(differs.argmax())
        return length if differs[length] else size

    def _bucket(self, third: int, second: int, first: int) -> int:
        mixed = (third * _PRIMES[2] + second * _PRIMES[1] + first * _PRIMES[0]) & _MASK
        return mixed >> self._shift

    def index(self, most: int) -> bool:
        """Add at most `most` places to the chains; return whether all places are in them.

        The last token's place is never added, because nothing follows it.
        """
        if len(self._before) < len(self._held):
            self._make_chains()
        end = min(self._end - 1, self._indexed + most)
        if end - self._indexed <= _MAX_LOOPED_PLACES:
            held = self._held
            for at in range(self._indexed, end):
                bucket = self._bucket(int(held[at - 2]), int(held[at - 1]), int(held[at]))
                self._before[at] = self._heads[bucket]
                self._heads[bucket] = at
        else:
            self._add(self._indexed, end)
        self._indexed = max(self._indexed, end)
        return self._indexed >= self._end - 1

    def _make_chains(self) -> None:
        """Make empty chains for the capacity of the text. They are made again when the capacity doubles."""
        bits = max(10, len(self._held).bit_length() + 1)
        self._shift = 32 - bits
        self._heads = np.full(1 << bits, -1, dtype=np.int32)
        self._before = np.full(len(self._held), -1, dtype=np.int32)
        self._indexed = MIN_MATCH_TOKENS - 1

    def _add(self, begin: int, end: int) -> None:
        """Add a range of places, each linked to the preceding place with the same hash."""
        held = self._held[begin - 2 : end].astype(np.uint64)
        mixed = held[:-2] * _PRIMES[2] + held[1:-1] * _PRIMES[1] + held[2:] * _PRIMES[0]
        buckets: npt.NDArray[np.uint64] = (mixed & np.uint64(_MASK)) >> np.uint64(self._shift)
        order = np.argsort(buckets, kind="stable")
        ranked, places = buckets[order], (order + begin).astype(np.int32)
        is_new = np.ones(len(order), dtype=np.bool_)
        is_new[1:] = ranked[1:] != ranked[:-1]
        before = np.empty(len(order), dtype=np.int32)
        before[1:] = places[:-1]
        before[is_new] = self._heads[ranked[is_new]]
        self._before[places] = before
        is_newest = np.append(is_new[1:], True)
        self._heads[ranked[is_newest]] = places[is_newest]


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
