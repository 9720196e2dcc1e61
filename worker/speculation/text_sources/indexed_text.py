"""Token text with an index, which finds earlier occurrences of the newest tokens in constant time."""

from collections.abc import Sequence
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
