"""Caches of a model that drafts: a row for each row of the target that it drafts for."""

from collections.abc import Sequence
from typing import Any

from worker.kv import batched
from worker.speculation.draft_state import DraftedRow


class RowCaches:
    """Rows in the order of the caches' rows. `draft.done` of each is the place in its text up to which it has run."""

    def __init__(self) -> None:
        self.rows: list[DraftedRow] = []
        self.caches: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def join(self, row: DraftedRow, caches: Sequence[Any], done: int) -> None:
        """Add a row with caches of its own."""
        merged = batched.merge([caches])
        if self.caches:
            batched.extend(self.caches, merged)
        else:
            self.caches = merged
        self.rows = [*self.rows, row]
        row.draft.done = done

    def discard(self, row: DraftedRow) -> None:
        if row not in self.rows:
            return
        row.draft.done = 0
        kept = [at for at, other in enumerate(self.rows) if other is not row]
        if kept:
            batched.keep(self.caches, kept)
        else:
            self.caches = []
        self.rows = [self.rows[at] for at in kept]

    def take(self, row: DraftedRow) -> tuple[list[Any], int]:
        """Take a row out: its caches, and how far it has run."""
        caches, done = batched.extract(self.caches, self.rows.index(row)), row.draft.done
        self.discard(row)
        return caches, done

    def ran(self, lengths: Sequence[int], width: int) -> None:
        """After a block of this width: row i keeps its first `lengths[i]` tokens."""
        batched.rewind(self.caches, [width - length for length in lengths])
        for row, length in zip(self.rows, lengths, strict=True):
            row.draft.done += length

    def give_back(self, count: int) -> None:
        """Take the newest tokens of all rows back."""
        batched.rewind(self.caches, [count] * len(self.rows))
