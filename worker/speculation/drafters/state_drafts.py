"""Drafts from captured hidden states of the target, for the rows of a batch.

The drafter has its own KV, with a row for each row of the target. It processes a row's recorded states when a draft is
requested. The newest of them are processed together with those of the other rows. A row whose KV comes from the prefix
cache, or that returns from the queue, has no states for tokens that were not computed again.

Drafts by a prediction head, for the rows of a batch: one forward pass of the head per token.

An input of the head is a pair: the target's hidden state at a position, and the token after it. Within a draft the head
uses its own states instead. Its own states are removed from its caches afterwards, because the next draft begins with
the target's states of the accepted tokens.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Draw, Rows
from worker.speculation.drafters.model_drafts import CachedProposer, bytes_per_token, columns, last_of
from worker.speculation.drafters.target import PROMPT_TAIL_TOKENS, CapturedStates, HiddenStateCapture
from worker.speculation.text_sources import DraftSource, Tokens

# Maximum number of a row's unread states that are processed together with other rows. With more states, the row is
# first processed alone.
_MAX_SHARED_STATES: Final = 32


@dataclass(slots=True)
class PendingStates:
    """States `[count, size]` of one row that are not processed yet, beginning at token `begin` of the row's text.

    Each part is a record, the row's index in the record, and the range of columns. The text lacks the newest token.
    """

    text: Tokens
    newest: int
    begin: int
    parts: list[tuple[CapturedStates, int, int, int]]

    @property
    def count(self) -> int:
        return sum(high - low for _, _, low, high in self.parts)

    @property
    def next_ids(self) -> list[int]:
        """Return the token after each state."""
        return [*self.text[self.begin + 1 :].tolist(), self.newest]

    def joined(self) -> mx.array:
        rows = [record.states[row, low:high] for record, row, low, high in self.parts]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows)


class StateDrafts(CachedProposer):
    """Base of proposers that use captured states.

    `tokens` is the number of ids in the drafter's embedding table; `make_caches` makes empty caches of one row.
    """

    def __init__(
        self, source: str, tokens: int, make_caches: Callable[[], list[Any]], tail: int = PROMPT_TAIL_TOKENS
    ) -> None:
        super().__init__(tokens)
        self.source = source
        self._make_caches = make_caches
        self.capture = HiddenStateCapture(tail)

    def begin(self, draw: Draw, rows: Rows) -> None:
        super().begin(draw, rows)
        self.capture.switch(is_on=True)

    def end(self) -> None:
        super().end()
        self.capture.switch(is_on=False)

    @property
    def nbytes(self) -> int:
        return self.capture.nbytes + self._rows.nbytes

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        asked = zip(rows, texts, newest, strict=True)
        pending = {row: self._pending(row, text, token) for row, text, token in asked}
        for row, states in pending.items():
            self._place(row, states)
        batch = [pending.get(row) for row in self._rows.rows]
        lengths = [0 if states is None else states.count for states in batch]
        if not any(lengths):
            return [[] for _ in rows]
        drafted = dict(zip(self._rows.rows, self._draft(batch, lengths, count), strict=True))
        return [drafted.get(row, []) for row in rows]

    @abstractmethod
    def _run(self, states: PendingStates, caches: list[Any]) -> None:
        """Process all states of one row except the last."""

    @abstractmethod
    def _draft(self, rows: Sequence[PendingStates | None], lengths: Sequence[int], count: int) -> list[list[int]]:
        """Process the states of all rows of the drafter's batch, `lengths[i]` of row i, and draft `count` tokens each.

        A row without a draft has None, and its result is not used.
        """

    def _batched(self, rows: Sequence[PendingStates | None], width: int) -> mx.array:
        """Return the target's states of all rows, `[rows, width, size]`."""
        whole = _single_record(rows)
        if whole is not None:
            record, begins = whole
            at = mx.minimum(mx.array(begins)[:, None] + mx.arange(width), record.states.shape[1] - 1)
            return mx.take_along_axis(record.states, at[..., None], axis=1)
        some = next(row for row in rows if row is not None).joined()
        filled = [mx.zeros((0, some.shape[-1]), some.dtype) if row is None else row.joined() for row in rows]
        return mx.stack([mx.pad(row, [(0, width - row.shape[0]), (0, 0)]) for row in filled])

    def _pending(self, row: DraftedRow, text: Tokens, newest: int) -> PendingStates:
        """Return the unprocessed states up to the last token of the text, as far back as the records reach."""
        done, need, parts = row.draft.done, len(text), list[tuple[CapturedStates, int, int, int]]()
        for record in reversed(self.capture.records):
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
        return PendingStates(text, newest, need, parts[::-1])

    def _place(self, row: DraftedRow, states: PendingStates) -> None:
        """Bring a row into the drafter's batch so that its next state is the first of `states`."""
        if states.parts and row in self._rows.rows and row.draft.done == states.begin:
            return
        self.discard(row)  # some states between the processed ones and these are missing
        if not states.parts:
            return
        caches, count = self._make_caches(), states.count
        if count > _MAX_SHARED_STATES:
            self._run(states, caches)
            mx.eval([cache.state for cache in caches])
            record, at, _, high = states.parts[-1]
            states.parts, states.begin = [(record, at, high - 1, high)], states.begin + count - 1
        self._rows.join(row, caches, states.begin)


def _single_record(rows: Sequence[PendingStates | None]) -> tuple[CapturedStates, list[int]] | None:
    """Return the record that holds all states of all rows in the rows' order, and the first column of each row; None if
    there is none.
    """
    first = next(row.parts[0][0] for row in rows if row is not None)
    begins: list[int] = []
    for at, row in enumerate(rows):
        if row is None or len(row.parts) != 1 or row.parts[0][0] is not first or row.parts[0][1] != at:
            return None
        begins.append(row.parts[0][2])
    return (first, begins) if len(rows) == len(first.rows) else None


class DraftHead(Protocol):
    """Head whose input is hidden states and the tokens after them, first the target's states, then its own.

    `size` is the width of its hidden states, `tokens` the number of ids in its embedding table.
    """

    size: int
    tokens: int

    def make_caches(self) -> list[Any]: ...

    def hidden(self, states: mx.array) -> mx.array:
        """Convert captured states to the head's input."""
        ...

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array: ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits with the target's vocabulary size."""
        ...


class HeadDrafts(StateDrafts):
    """Proposer that uses a head. The head was trained to draft one token; further tokens continue its own draft."""

    def __init__(self, head: DraftHead, dtype: mx.Dtype, source: str = DraftSource.HEAD) -> None:
        super().__init__(source, head.tokens, head.make_caches)
        self._head = head
        caches = head.make_caches()
        head(mx.array([[0]]), mx.zeros((1, 1, head.size), dtype), caches)
        self.token_bytes = bytes_per_token(caches)

    def _run(self, states: PendingStates, caches: list[Any]) -> None:
        ids = self._inputs([states.next_ids[:-1]])
        self._head(ids, self._head.hidden(states.joined()[None, :-1]), caches)

    def _draft(self, rows: Sequence[PendingStates | None], lengths: Sequence[int], count: int) -> list[list[int]]:
        ids = self._inputs([[] if states is None else states.next_ids for states in rows])
        hidden = self._head.hidden(self._batched(rows, max(lengths)))
        state = last_of(self._head(ids, hidden, self._rows.caches), lengths)
        self._rows.accept(lengths)
        drafted = [self._drawn(self._head.logits(state)[:, 0], 0)]
        for position in range(1, count):
            state = self._head(drafted[-1][:, None], state, self._rows.caches)
            drafted.append(self._drawn(self._head.logits(state)[:, 0], position))
        self._rows.rewind(count - 1)
        return columns(drafted)
