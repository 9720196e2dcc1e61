"""Text of tokens in which earlier places of its newest tokens are found in constant time."""

from typing import Final

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

# Shorter matches say too little.
LEAST: Final = 3
# A match is followed back so far: longer ones are no surer.
REACH: Final = 32
# Stands where a text ends or is not to be drafted from: no draft reaches over it.
BREAK: Final = -1
# Of the places that match, the newest ones are compared; of those with the same hash, so many are looked at.
_TRIES: Final = 16
_STEPS: Final = 64
# Places that one search adds to the index: what was indexed again as a whole would take several steps' time.
_PIECE: Final = 4096
_FEW: Final = 16
_PRIMES: Final = (2654435761, 2246822519, 3266489917)
_MASK: Final = (1 << 32) - 1
_ROOM: Final = 1024


class IndexedTokens:
    """Tokens that grow at their end, with hash chains over their runs of `LEAST`, as in zlib: a place is the last token
    of a run, and each knows the one before it with the same hash."""

    def __init__(self, tokens: Tokens) -> None:
        self._end = len(tokens)
        self._held = np.empty(self._end + _ROOM, dtype=np.int32)
        self._held[: self._end] = tokens
        self._heads = np.empty(0, dtype=np.int32)
        self._before = np.empty(0, dtype=np.int32)
        # Places before this one are in the chains.
        self._indexed = LEAST - 1
        self._shift = 32

    def __len__(self) -> int:
        return self._end

    @property
    def tokens(self) -> Tokens:
        return self._held[: self._end]

    def extend(self, tokens: Tokens | list[int] | tuple[int, ...]) -> None:
        end = self._end + len(tokens)
        if end > len(self._held):
            self._held = np.concatenate([self._held, np.empty(end, dtype=np.int32)])
        self._held[self._end : end] = tokens
        self._end = end

    def shorten(self) -> None:
        """Take the newest token back."""
        self._end -= 1

    def longest(self, tail: Tokens) -> tuple[int, int]:
        """Place and length of the longest match of the end of `tail`, behind which there is more; -1 for none."""
        if len(tail) < LEAST or self._end <= LEAST:
            return -1, 0
        self.index(_PIECE)
        tail = tail[-REACH:][::-1]
        first, second, third = tail[:LEAST].tolist()
        held, last = self._held, self._end - 1
        at, steps, tries = int(self._heads[self._bucket(third, second, first)]), _STEPS, _TRIES
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
        """Length of the match of a reversed tail that ends at a place."""
        size = min(len(tail), at + 1)
        differs = self._held[at - size + 1 : at + 1][::-1] != tail[:size]
        length = int(differs.argmax())
        return length if differs[length] else size

    def _bucket(self, third: int, second: int, first: int) -> int:
        mixed = (third * _PRIMES[2] + second * _PRIMES[1] + first * _PRIMES[0]) & _MASK
        return mixed >> self._shift

    @property
    def is_indexed(self) -> bool:
        """Whether every place is in the chains that can be."""
        return self._indexed >= self._end - 1

    def index(self, most: int) -> None:
        """Add at most so many places to the chains; the last token's is never one, as nothing is behind it."""
        if len(self._before) < len(self._held):
            self._make_chains()
        end = min(self._end - 1, self._indexed + most)
        if end - self._indexed <= _FEW:
            held = self._held
            for at in range(self._indexed, end):
                bucket = self._bucket(int(held[at - 2]), int(held[at - 1]), int(held[at]))
                self._before[at] = self._heads[bucket]
                self._heads[bucket] = at
        else:
            self._add(self._indexed, end)
        self._indexed = max(self._indexed, end)

    def _make_chains(self) -> None:
        """Chains for a text of this room; a longer one begins them again, each time twice as long."""
        bits = max(10, len(self._held).bit_length() + 1)
        self._shift = 32 - bits
        self._heads = np.full(1 << bits, -1, dtype=np.int32)
        self._before = np.full(len(self._held), -1, dtype=np.int32)
        self._indexed = LEAST - 1

    def _add(self, begin: int, end: int) -> None:
        """The places of one piece: each after the one before it with the same hash."""
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
