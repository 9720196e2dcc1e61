"""Drafts by a second, smaller model with the same tokenizer, for the rows of a batch.

The draft model has its own KV. It processes a new text in slices between the target's steps, one row after another, and
the newly accepted tokens with each draft. A row has drafts once its whole text has been processed.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from worker.speculation.draft_state import DraftedRow, DraftReading
from worker.speculation.drafters.row_caches import CachedProposer, RowCaches, bytes_per_token, columns, last_of
from worker.speculation.drafters.target import with_vocab
from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import DraftSource

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
