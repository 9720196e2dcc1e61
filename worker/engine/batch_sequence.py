"""Sequences of a batch, and the caches that hold their KV row by row."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from worker.engine.row import Member
from worker.kv import batched


@dataclass(slots=True)
class BatchSequences:
    """Sequences and, in the same order, the rows of `caches`."""

    members: list[Member] = field(default_factory=list[Member])
    caches: list[Any] = field(default_factory=list[Any])

    def __len__(self) -> int:
        return len(self.members)

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def extend(self, other: "BatchSequences") -> None:
        """Take over all rows of `other`."""
        if not self.members:
            self.caches = other.caches
        elif other.members:
            batched.extend(self.caches, other.caches)
        self.members = self.members + other.members

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        if len(rows) == len(self.members):
            return
        if rows:
            batched.keep(self.caches, rows)
        else:
            self.caches = []
        self.members = [self.members[at] for at in rows]

    def split(self, rows: Sequence[int]) -> "BatchSequences":
        """Take these rows out."""
        taken = BatchSequences(self.members, self.caches)
        if len(rows) == len(self.members):
            self.members, self.caches = [], []
            return taken
        taken.caches = copy.deepcopy(self.caches)
        taken.keep(rows)
        self.keep([at for at in range(len(self.members)) if at not in rows])
        return taken

    def extract(self, at: int) -> tuple[list[Any], list[int]]:
        """The caches of one row, as views, and the tokens that they hold; of a row without any there are none.

        mlx-lm 0.31's `ArraysCache` raises a `TypeError` where it has held nothing.
        """
        tokens = self.members[at].tokens
        return (batched.extract(self.caches, at), list(tokens)) if tokens else ([], [])

    def evaluate(self) -> None:
        mx.eval([cache.state for cache in self.caches])

    def launch(self) -> None:
        mx.async_eval([cache.state for cache in self.caches])
