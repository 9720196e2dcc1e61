"""Drafts by a second, smaller model with the same tokens, for the rows of a batch.

It reads the rows' texts with KV of its own: those that it was asked for in slices between the steps of the target, one
row after the other, and from then on what was accepted since. A row has drafts once its text has been read.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from worker.speculation.draft_state import DraftedRow, DraftReading
from worker.speculation.drafter import Draw, Rows
from worker.speculation.drafters.logits import as_wide
from worker.speculation.drafters.row_caches import RowCaches
from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import DraftSource

# Unread tokens of a text that are read together with the newest tokens of the other rows: so many, or as many as make
# up this number of tokens of all rows.
TOGETHER: Final = 16
PADDED: Final = 64


class ModelDrafts:
    """Proposer of a target with a draft model, whose caches keep tokens one by one."""

    source: str = DraftSource.MODEL
    longest = 7

    def __init__(self, model: Any, tokens: int, vocab: int) -> None:
        """`tokens` are those that the model has embeddings of, `vocab` is the width of the target's logits."""
        self._model = model
        self._tokens = tokens
        self._vocab = vocab
        self._draw: Draw | None = None
        self._rows = RowCaches()
        # Rows whose texts are being read, in the order in which they were asked for.
        self._reading: list[DraftedRow] = []
        self.token_bytes = self._probe()

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._draw = draw
        self.end()

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
        """Texts that are being read, in the order in which they were asked for."""
        return [row.draft.reading for row in self._reading if row.draft.reading is not None]

    def is_reading(self, row: DraftedRow) -> bool:
        return row.draft.reading is not None and row.draft.reading.left > 0

    def read(self, count: int) -> int:
        text = next((text for text in self._texts if text.left), None)
        if text is None:
            return 0
        ids = text.text[text.done : text.done + count].tolist()
        self._model(self._known([ids]), cache=text.caches)
        mx.eval([cache.state for cache in text.caches])
        text.done += len(ids)
        return len(ids)

    def discard(self, row: DraftedRow) -> None:
        self._stop_reading(row)
        self._rows.discard(row)

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        assert self._draw is not None
        known = {row: (text, token) for row, text, token in zip(rows, texts, newest, strict=True)}
        for row, text in zip(rows, texts, strict=True):
            self._place(row, text)
        if not any(row in known for row in self._rows.rows):
            return [[] for _ in rows]
        ids = [_unread(row, *known[row]) if row in known else [] for row in self._rows.rows]
        drafted = dict(zip(self._rows.rows, self._draft(ids, count), strict=True))
        return [drafted.get(row, []) for row in rows]

    def _draft(self, ids: Sequence[list[int]], count: int) -> list[list[int]]:
        """Read the rest of each text and the newest token, then what the model says itself, one after the other."""
        assert self._draw is not None
        rows, lengths = self._rows, [len(row) for row in ids]
        width = max(lengths)
        padded = self._known([[*row, *[0] * (width - len(row))] for row in ids])
        logits = self._model(padded, cache=rows.caches)
        rows.ran(lengths, width)
        last = mx.array([max(0, length - 1) for length in lengths])
        drafted = [self._next(mx.take_along_axis(logits, last[:, None, None], axis=1), 0)]
        for ahead in range(1, count):
            own = mx.minimum(drafted[-1][:, None], self._tokens - 1)
            drafted.append(self._next(self._model(own, cache=rows.caches), ahead))
        rows.give_back(count - 1)
        columns: Any = mx.stack(drafted, axis=1).tolist()
        return columns

    def _next(self, logits: mx.array, ahead: int) -> mx.array:
        assert self._draw is not None
        return self._draw(self._rows.rows, as_wide(logits[:, 0], self._vocab), ahead)

    def _place(self, row: DraftedRow, text: Tokens) -> None:
        """A row with little to read goes to the others; one with much is read alone first."""
        together = max(TOGETHER, PADDED // max(1, len(self._rows.rows)))
        if row in self._rows.rows:
            if len(text) - row.draft.done > together:
                self._start_reading(row, DraftReading(text, *self._rows.take(row)))
            return
        reading = row.draft.reading or DraftReading(text, make_prompt_cache(self._model))
        reading.text = text
        if reading.left > together:
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

    def _known(self, ids: list[list[int]]) -> mx.array:
        """Ids that there are embeddings of: the target may have more, and the placeholder of a medium lie beyond."""
        return mx.minimum(mx.array(ids, dtype=mx.uint32), self._tokens - 1)

    def _probe(self) -> int:
        """Bytes of KV that a token of a row takes."""
        caches = make_prompt_cache(self._model)
        self._model(mx.array([[0]]), cache=caches)
        arrays: list[Any] = [array for cache in caches for array in cache.state[:2]]
        return sum(array[..., :1, :].nbytes for array in arrays)


def _unread(row: DraftedRow, text: Tokens, newest: int) -> list[int]:
    return [*text[row.draft.done :].tolist(), newest]
