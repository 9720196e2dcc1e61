"""KV of a drafting model, with a cache row for each row of the target that has drafts."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from worker.kv import batched
from worker.kv.kv import leaves
from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Draw, Proposer, Rows


class RowCaches:
    """Rows in the order of the cache rows; each row's `draft.done` is the number of its tokens in the caches."""

    def __init__(self) -> None:
        self.rows: list[DraftedRow] = []
        self.caches: list[Any] = []

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)

    def join(self, row: DraftedRow, caches: Sequence[Any], done: int) -> None:
        """Add a row with its own caches, which hold `done` tokens."""
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
        kept = batched.without(len(self.rows), [self.rows.index(row)])
        if kept:
            batched.keep(self.caches, kept)
        else:
            self.caches = []
        self.rows = [self.rows[at] for at in kept]

    def extract(self, row: DraftedRow) -> tuple[list[Any], int]:
        """Remove a row; return its caches and the number of tokens that they hold."""
        caches, done = batched.extract(self.caches, self.rows.index(row)), row.draft.done
        self.discard(row)
        return caches, done

    def accept(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[i]` tokens of row i's newest block, and remove its padding."""
        width = max(lengths)
        batched.rewind(self.caches, [width - length for length in lengths])
        for row, length in zip(self.rows, lengths, strict=True):
            row.draft.done += length

    def rewind(self, count: int) -> None:
        """Remove the newest `count` tokens of each row."""
        batched.rewind(self.caches, [count] * len(self.rows))


class CachedProposer(Proposer):
    """Base of proposers with their own KV. `tokens` is the number of ids in the drafter's embedding table."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._draw: Draw
        self._rows = RowCaches()

    def begin(self, draw: Draw, rows: Rows) -> None:
        self.end()
        self._draw = draw

    def end(self) -> None:
        self._rows = RowCaches()

    def discard(self, row: DraftedRow) -> None:
        self._rows.discard(row)

    def _inputs(self, ids: Sequence[Sequence[int]]) -> mx.array:
        """Return ids `[rows, width]`, padded with 0. Ids beyond the embedding table are replaced by its last id: the
        target may have more tokens, and a medium's placeholder may lie beyond the table.
        """
        width = max(map(len, ids))
        padded = mx.array([[*row, *[0] * (width - len(row))] for row in ids], dtype=mx.uint32)
        return mx.minimum(padded, self._tokens - 1)

    def _drawn(self, logits: mx.array, position: int) -> mx.array:
        return self._draw(self._rows.rows, logits, position)


def last_of(values: mx.array, lengths: Sequence[int]) -> mx.array:
    """Return row i's value at index `lengths[i] - 1` of `[rows, width, size]`, as `[rows, 1, size]`."""
    last = mx.array([max(0, length - 1) for length in lengths])
    return mx.take_along_axis(values, last[:, None, None], axis=1)


def columns(drafted: Sequence[mx.array]) -> list[list[int]]:
    """Return the draft of each row, given the drafted ids `[rows]` of each position."""
    drafts: Any = mx.stack(list(drafted), axis=1).tolist()
    return drafts


def bytes_per_token(caches: Sequence[Any]) -> int:
    """Return the bytes per token in the caches of one row, which must hold at least one token."""
    arrays: list[Any] = [array for leaf in leaves(caches) for array in leaf.state[:2]]
    return sum(array[..., :1, :].nbytes for array in arrays)
