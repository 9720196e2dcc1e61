"""Group of sequences whose KV is in the same caches, row by row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from worker.engine.row import BatchSequence
from worker.kv import batched


@dataclass(slots=True)
class SequenceGroup:
    """Sequences, in the order of their rows in `caches`."""

    sequences: list[BatchSequence] = field(default_factory=list[BatchSequence])
    caches: list[Any] = field(default_factory=list[Any])

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def extend(self, other: "SequenceGroup") -> None:
        """Append all rows of `other`, which must not be used afterwards."""
        if not self.sequences:
            self.caches = other.caches
        elif other.sequences:
            batched.extend(self.caches, other.caches)
        self.sequences = self.sequences + other.sequences

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        if len(rows) == len(self.sequences):
            return
        if rows:
            batched.keep(self.caches, rows)
        else:
            self.caches = []
        self.sequences = [self.sequences[at] for at in rows]

    def split(self, rows: Sequence[int]) -> "SequenceGroup":
        """Remove these rows and return them as a group."""
        if len(rows) == len(self.sequences):
            taken = SequenceGroup(self.sequences, self.caches)
            self.sequences, self.caches = [], []
            return taken
        taken = SequenceGroup([self.sequences[at] for at in rows], batched.take(self.caches, rows))
        taken.launch()
        self.keep(batched.without(len(self.sequences), rows))
        return taken

    def extract(self, at: int) -> tuple[list[Any], list[int]]:
        """Return the caches of one row as views, and the tokens in the caches; a row without tokens has no caches.

        The caches of a row without tokens are not extracted, because mlx-lm 0.31's `ArraysCache` raises `TypeError` if
        it has never had contents.
        """
        tokens = self.sequences[at].tokens
        return (batched.extract(self.caches, at), list(tokens)) if tokens else ([], [])

    def evaluate(self) -> None:
        mx.eval([cache.state for cache in self.caches])

    def launch(self) -> None:
        mx.async_eval([cache.state for cache in self.caches])
