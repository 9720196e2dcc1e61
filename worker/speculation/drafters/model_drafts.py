"""Drafts by a second, smaller model with the same tokenizer, for the rows of a batch.

The draft model has its own KV. It processes a new text in slices between the target's steps, one row after another, and
the newly accepted tokens with each draft. A row has drafts once its whole text has been processed.

KV of a drafting model, with a cache row for each row of the target that has drafts.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from worker.kv import batched
from worker.kv.spans_and_checkpoints import leaves
from worker.speculation.draft_state import DraftedRow, DraftReading
from worker.speculation.drafter import Draw, Proposer, Rows
from worker.speculation.drafters.target import with_vocab
from worker.speculation.text_sources import DraftSource, Tokens


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


# Maximum number of a text's unread tokens that are processed together with the newest tokens of the other rows.
MAX_SHARED_TOKENS: Final = 16
# Maximum number of unread tokens that are processed together in all rows.
MAX_SHARED_TOTAL_TOKENS: Final = 64


class ModelDrafts(CachedProposer):
    """Proposer that uses a draft model, whose caches can be shortened token by token.

    `tokens` is the number of ids in the draft model's embedding table, `vocab` the width of the target's logits.
    """

    source: str = DraftSource.MODEL

    def __init__(self, model: Any, tokens: int, vocab: int) -> None:
        super().__init__(tokens)
        self._model = model
        self._vocab = vocab
        # Rows whose texts are being processed, the oldest first.
        self._reading: list[DraftedRow] = []
        caches = make_prompt_cache(model)
        model(mx.array([[0]]), cache=caches)
        self.token_bytes = bytes_per_token(caches)

    def end(self) -> None:
        self._rows, self._reading = RowCaches(), []

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + sum(cache.nbytes for text in self._texts for cache in text.caches)

    @property
    def unread(self) -> int:
        return sum(text.left for text in self._texts)

    @property
    def _texts(self) -> list[DraftReading]:
        return [row.draft.reading for row in self._reading if row.draft.reading is not None]

    def is_reading(self, row: DraftedRow) -> bool:
        return row.draft.reading is not None and row.draft.reading.left > 0

    def read(self, count: int) -> int:
        text = next((text for text in self._texts if text.left), None)
        if text is None:
            return 0
        ids = text.text[text.done : text.done + count].tolist()
        self._model(self._inputs([ids]), cache=text.caches)
        mx.eval([cache.state for cache in text.caches])
        text.done += len(ids)
        return len(ids)

    def discard(self, row: DraftedRow) -> None:
        self._stop_reading(row)
        super().discard(row)

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        known = {row: (text, token) for row, text, token in zip(rows, texts, newest, strict=True)}
        for row, text in zip(rows, texts, strict=True):
            self._place(row, text)
        if not any(row in known for row in self._rows.rows):
            return [[] for _ in rows]
        ids = [_unread(row, *known[row]) if row in known else [] for row in self._rows.rows]
        drafted = dict(zip(self._rows.rows, self._draft(ids, count), strict=True))
        return [drafted.get(row, []) for row in rows]

    def _draft(self, ids: Sequence[list[int]], count: int) -> list[list[int]]:
        """Process the rest of each text and the newest token, then generate `count` tokens."""
        rows, lengths = self._rows, [len(row) for row in ids]
        logits = last_of(self._model(self._inputs(ids), cache=rows.caches), lengths)
        rows.accept(lengths)
        drafted = [self._next(logits, 0)]
        for position in range(1, count):
            own = mx.minimum(drafted[-1][:, None], self._tokens - 1)
            drafted.append(self._next(self._model(own, cache=rows.caches), position))
        rows.rewind(count - 1)
        return columns(drafted)

    def _next(self, logits: mx.array, position: int) -> mx.array:
        return self._drawn(with_vocab(logits[:, 0], self._vocab), position)

    def _place(self, row: DraftedRow, text: Tokens) -> None:
        """Put a row into the batch. If it has many unread tokens, they are first processed alone."""
        shared = max(MAX_SHARED_TOKENS, MAX_SHARED_TOTAL_TOKENS // max(1, len(self._rows.rows)))
        if row in self._rows.rows:
            if len(text) - row.draft.done > shared:
                self._start_reading(row, DraftReading(text, *self._rows.extract(row)))
            return
        reading = row.draft.reading or DraftReading(text, make_prompt_cache(self._model))
        reading.text = text
        if reading.left > shared:
            self._start_reading(row, reading)
        else:
            self._stop_reading(row)
            self._rows.join(row, reading.caches, reading.done)

    def _start_reading(self, row: DraftedRow, reading: DraftReading) -> None:
        if row not in self._reading:
            self._reading.append(row)
        row.draft.reading = reading

    def _stop_reading(self, row: DraftedRow) -> None:
        if row in self._reading:
            self._reading.remove(row)
        row.draft.reading = None


def _unread(row: DraftedRow, text: Tokens, newest: int) -> list[int]:
    return [*text[row.draft.done :].tolist(), newest]
