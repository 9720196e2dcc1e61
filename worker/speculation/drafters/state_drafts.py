"""Drafts that are made of hidden states of the target, for the rows of a batch.

Such a drafter has KV of its own, a row of it for each row of the target. A row's states come from the records of the
taps: they run through the drafter when it is asked for the row, the newest of them together with those of the other
rows. A row that comes with KV from the prefix cache, or back from the queue, has states from there on only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Draw, Rows
from worker.speculation.drafters.hidden_states import CapturedStates, HiddenStateCapture
from worker.speculation.drafters.row_caches import RowCaches
from worker.speculation.text_sources.indexed_text import Tokens

# A row with more states that have not run gets a pass of its own for them.
_ALONE: Final = 32


@dataclass(slots=True)
class States:
    """States of one row that have not run: hidden states `[count, size]` from `begin` on, as parts of records."""

    begin: int
    parts: list[tuple[CapturedStates, int, int, int]]

    @property
    def count(self) -> int:
        return sum(high - low for _, _, low, high in self.parts)

    def joined(self) -> mx.array:
        rows = [record.states[row, low:high] for record, row, low, high in self.parts]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows)


class StateDrafts(ABC):
    """Proposer of a target with taps; `tokens` are those that it has embeddings of."""

    longest = 7
    # It sees no more of a prompt than what was tapped, which one pass takes in.
    unread = 0

    def __init__(self, taps: HiddenStateCapture, source: str, tokens: int) -> None:
        self.source = source
        self.taps = taps
        self.token_bytes = 0
        self._tokens = tokens
        self._draw: Draw | None = None
        self._rows = RowCaches()

    def begin(self, draw: Draw, rows: Rows) -> None:
        self._draw = draw
        self.taps.is_on = True
        self.taps.clear()
        self._rows = RowCaches()

    def end(self) -> None:
        self.taps.is_on = False
        self.taps.clear()
        self._rows = RowCaches()

    @property
    def nbytes(self) -> int:
        return self.taps.nbytes + self._rows.nbytes

    def is_reading(self, row: DraftedRow) -> bool:
        return False

    def read(self, count: int) -> int:
        return 0

    def discard(self, row: DraftedRow) -> None:
        self._rows.discard(row)

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        states = {row: self._pending(row, len(text)) for row, text in zip(rows, texts, strict=True)}
        tokens = {row: (text, token) for row, text, token in zip(rows, texts, newest, strict=True)}
        for row in rows:
            self._place(row, states[row], *tokens[row])
        ready = [row for row in self._rows.rows if row in states and states[row].parts]
        if not ready:
            return [[] for _ in rows]
        lengths = [states[row].count if row in ready else 0 for row in self._rows.rows]
        drafts = self._draft(states, tokens, lengths, count)
        drafted = dict(zip(self._rows.rows, drafts, strict=True))
        return [drafted[row] if row in ready else [] for row in rows]

    @abstractmethod
    def _make_caches(self) -> list[Any]:
        """Of one row."""

    @abstractmethod
    def _run(self, states: States, text: Tokens, newest: int, caches: list[Any]) -> None:
        """Run all states of one row but the last."""

    @abstractmethod
    def _draft(
        self,
        states: dict[DraftedRow, States],
        tokens: dict[DraftedRow, tuple[Tokens, int]],
        lengths: list[int],
        count: int,
    ) -> list[list[int]]:
        """Run each row's states, of which it has `lengths`, and draft so many tokens of each."""

    def _batched(self, states: dict[DraftedRow, States], lengths: Sequence[int], width: int) -> mx.array:
        """The target's states of all rows, `[rows, width, size]`."""
        rows = [states[row] if length else None for row, length in zip(self._rows.rows, lengths, strict=True)]
        whole = _whole(rows)
        if whole is not None:
            record, begins = whole
            at = mx.minimum(mx.array(begins)[:, None] + mx.arange(width), record.states.shape[1] - 1)
            return mx.take_along_axis(record.states, at[..., None], axis=1)
        some = next(row for row in rows if row is not None).joined()
        filled = [mx.zeros((0, some.shape[-1]), some.dtype) if row is None else row.joined() for row in rows]
        return mx.stack([mx.pad(row, [(0, width - row.shape[0]), (0, 0)]) for row in filled])

    def _pending(self, row: DraftedRow, end: int) -> States:
        """States of a row up to the last known token, as far back as there are any, or as they have not run."""
        done, need, parts = row.draft.done, end, list[tuple[CapturedStates, int, int, int]]()
        for record in reversed(self.taps.records):
            if need <= done:
                break
            if row.draft not in record.rows:
                continue
            at = record.rows.index(row.draft)
            start, length = record.starts[at], record.lengths[at]
            if start < need <= start + length:
                low = max(start, done)
                begin = record.begins[at] - start
                parts.append((record, at, begin + low, begin + need))
                need = low
        return States(need, parts[::-1])

    def _place(self, row: DraftedRow, states: States, text: Tokens, newest: int) -> None:
        """A row in the batch of the drafter whose next state is the first of these."""
        if states.parts and row in self._rows.rows and row.draft.done == states.begin:
            return
        self.discard(row)  # there is a gap: what has run is not what comes before
        if not states.parts:
            return
        caches, count = self._make_caches(), states.count
        if count > _ALONE:
            self._run(states, text, newest, caches)
            mx.eval([cache.state for cache in caches])
            record, at, _, high = states.parts[-1]
            states.parts, states.begin = [(record, at, high - 1, high)], states.begin + count - 1
        self._rows.join(row, caches, states.begin)

    def _known(self, ids: list[list[int]]) -> mx.array:
        """Ids that there are embeddings of: the placeholder of a medium may lie beyond the table."""
        return mx.minimum(mx.array(ids, dtype=mx.uint32), self._tokens - 1)


def _whole(rows: Sequence[States | None]) -> tuple[CapturedStates, list[int]] | None:
    """The record of which each row's states are a part, row by row, with the column at which they begin."""
    first = next(row.parts[0][0] for row in rows if row is not None)
    begins: list[int] = []
    for at, row in enumerate(rows):
        if row is None or len(row.parts) != 1 or row.parts[0][0] is not first or row.parts[0][1] != at:
            return None
        begins.append(row.parts[0][2])
    return (first, begins) if len(rows) == len(first.rows) else None
