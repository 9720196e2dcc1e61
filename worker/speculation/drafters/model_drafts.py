"""Drafts by a second, smaller model with the same tokens, for the rows of a batch.

It reads the rows' texts with KV of its own: those that it was asked for in slices between the steps of the target, one
row after the other, and from then on what was accepted since. A row has drafts once its text has been read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from worker.speculation.drafter import Draw, Rows, Tokens
from worker.speculation.drafters.logits import as_wide
from worker.speculation.drafters.row_caches import RowCaches
from worker.speculation.text_sources.lookup import DraftSource

# Unread tokens of a text that are read together with the newest tokens of the other rows: so many, or as many as make
# up this number of tokens of all rows.
TOGETHER: Final = 16
PADDED: Final = 64


@dataclass(slots=True)
class _Reading:
    """A row that is read alone: its caches, and its text as it was when it was asked for."""

    text: Tokens
    caches: list[Any]
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.text) - self.done


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
        self._reading: dict[int, _Reading] = {}
        self.token_bytes = self._probe()

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._draw = draw
        self.end()

    def end(self) -> None:
        self._rows, self._reading = RowCaches(), {}

    @property
    def nbytes(self) -> int:
        reading = sum(cache.nbytes for row in self._reading.values() for cache in row.caches)
        return self._rows.nbytes + reading

    @property
    def unread(self) -> int:
        return sum(row.left for row in self._reading.values())

    def is_reading(self, uid: int) -> bool:
        row = self._reading.get(uid)
        return row is not None and row.left > 0

    def read(self, count: int) -> int:
        row = next((row for row in self._reading.values() if row.left), None)
        if row is None:
            return 0
        ids = row.text[row.done : row.done + count].tolist()
        self._model(self._known([ids]), cache=row.caches)
        mx.eval([cache.state for cache in row.caches])
        row.done += len(ids)
        return len(ids)

    def discard(self, uid: int) -> None:
        self._reading.pop(uid, None)
        self._rows.discard(uid)

    def propose(
        self, uids: Sequence[int], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        assert self._draw is not None
        known = {uid: (text, token) for uid, text, token in zip(uids, texts, newest, strict=True)}
        for uid, text in zip(uids, texts, strict=True):
            self._place(uid, text)
        ready = [uid for uid in self._rows.uids if uid in known]
        if not ready:
            return [[] for _ in uids]
        ids = [self._unread(uid, *known[uid]) if uid in known else [] for uid in self._rows.uids]
        drafted = dict(zip(self._rows.uids, self._draft(ids, count), strict=True))
        return [drafted.get(uid, []) for uid in uids]

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
        return self._draw(self._rows.uids, as_wide(logits[:, 0], self._vocab), ahead)

    def _unread(self, uid: int, text: Tokens, newest: int) -> list[int]:
        return [*text[self._rows.done[uid] :].tolist(), newest]

    def _place(self, uid: int, text: Tokens) -> None:
        """A row with little to read goes to the others; one with much is read alone first."""
        together = max(TOGETHER, PADDED // max(1, len(self._rows.uids)))
        if uid in self._rows.done:
            if len(text) - self._rows.done[uid] > together:
                self._reading[uid] = _Reading(text, *self._rows.take(uid))
            return
        row = self._reading.get(uid) or _Reading(text, make_prompt_cache(self._model))
        row.text = text
        if row.left > together:
            self._reading[uid] = row
        else:
            self._reading.pop(uid, None)
            self._rows.join(uid, row.caches, row.done)

    def _known(self, ids: list[list[int]]) -> mx.array:
        """Ids that there are embeddings of: the target may have more, and the placeholder of a medium lie beyond."""
        return mx.minimum(mx.array(ids, dtype=mx.uint32), self._tokens - 1)

    def _probe(self) -> int:
        """Bytes of KV that a token of a row takes."""
        caches = make_prompt_cache(self._model)
        self._model(mx.array([[0]]), cache=caches)
        arrays: list[Any] = [array for cache in caches for array in cache.state[:2]]
        return sum(array[..., :1, :].nbytes for array in arrays)
