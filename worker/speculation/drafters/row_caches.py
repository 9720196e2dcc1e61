"""Caches of a model that drafts: a row for each row of the target that it drafts for."""

from collections.abc import Sequence
from typing import Any

from worker.kv import batched


class RowCaches:
    """Rows by their uids, in the order of the caches' rows, with the place in a row's text up to which it has run."""

    def __init__(self) -> None:
        self.uids: list[int] = []
        self.done: dict[int, int] = {}
        self.caches: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def join(self, uid: int, caches: Sequence[Any], done: int) -> None:
        """Add a row with caches of its own."""
        merged = batched.merge([caches])
        if self.caches:
            batched.extend(self.caches, merged)
        else:
            self.caches = merged
        self.uids = [*self.uids, uid]
        self.done[uid] = done

    def discard(self, uid: int) -> None:
        if self.done.pop(uid, None) is None:
            return
        rows = [at for at, other in enumerate(self.uids) if other != uid]
        if rows:
            batched.keep(self.caches, rows)
        else:
            self.caches = []
        self.uids = [self.uids[at] for at in rows]

    def take(self, uid: int) -> tuple[list[Any], int]:
        """Take a row out: its caches, and how far it has run."""
        caches, done = batched.extract(self.caches, self.uids.index(uid)), self.done[uid]
        self.discard(uid)
        return caches, done

    def ran(self, lengths: Sequence[int], width: int) -> None:
        """After a block of this width: row i keeps its first `lengths[i]` tokens."""
        batched.rewind(self.caches, [width - length for length in lengths])
        for uid, length in zip(self.uids, lengths, strict=True):
            self.done[uid] += length

    def give_back(self, count: int) -> None:
        """Take the newest tokens of all rows back."""
        batched.rewind(self.caches, [count] * len(self.uids))
