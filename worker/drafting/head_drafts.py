"""Drafts by a head, for the rows of a batch: one forward pass of the head a token.

The head has KV of its own, a row of it for each row of the target, of pairs: the target's hidden state of a position,
and the token after it. Pairs of a draft are made of the head's own states, and are taken back when it is made: the next
draft begins with the target's states of what was accepted. A row that comes with KV from the prefix cache, or back from
the queue, has states from there on only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import mlx.core as mx

from worker.drafting.row_caches import RowCaches
from worker.drafting.taps import Record, Taps
from worker.speculation.drafter import Draw, Tokens
from worker.speculation.lookup import Source

# A row with more pairs that have not run gets a pass of its own for them.
_ALONE: Final = 32


class Feeding(Protocol):
    """A head: it is fed with hidden states and the tokens after them, and then with its own.

    `size` is that of the hidden states as it takes them, and `tokens` are those that it has embeddings of.
    """

    size: int
    tokens: int

    def make_caches(self) -> list[Any]: ...

    def hidden(self, states: mx.array) -> mx.array:
        """Hidden states of what was tapped."""
        ...

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array: ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Over as many tokens as the target's."""
        ...


@dataclass(slots=True)
class _Pairs:
    """Pairs of one row that have not run: hidden states `[count, size]` up to `end`, as parts of records."""

    begin: int
    parts: list[tuple[Record, int, int, int]]

    @property
    def count(self) -> int:
        return sum(high - low for _, _, low, high in self.parts)

    def states(self) -> mx.array:
        rows = [record.states[row, low:high] for record, row, low, high in self.parts]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows)


class HeadDrafts:
    """Proposer of a target with a head."""

    # The head was trained for one token, and feeds on its own draft for more.
    longest = 7
    # It sees no more of a prompt than what was tapped, which one pass takes in.
    unread = 0

    def __init__(self, head: Feeding, taps: Taps, dtype: mx.Dtype, source: str = Source.HEAD) -> None:
        self.source = source
        self._head = head
        self.taps = taps
        self._draw: Draw | None = None
        self._rows = RowCaches()
        self.token_bytes = self._probe(dtype)

    def begin(self, draw: Draw) -> None:
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

    def is_reading(self, uid: int) -> bool:
        return False

    def read(self, count: int) -> int:
        return 0

    def discard(self, uid: int) -> None:
        self._rows.discard(uid)

    def propose(
        self, uids: Sequence[int], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        assert self._draw is not None
        pairs = {uid: self._pairs(uid, len(text)) for uid, text in zip(uids, texts, strict=True)}
        tokens = {uid: (text, token) for uid, text, token in zip(uids, texts, newest, strict=True)}
        for uid in uids:
            self._place(uid, pairs[uid], *tokens[uid])
        rows = [uid for uid in self._rows.uids if uid in pairs and pairs[uid].parts]
        if not rows:
            return [[] for _ in uids]
        lengths = [pairs[uid].count if uid in rows else 0 for uid in self._rows.uids]
        drafts = self._draft(pairs, tokens, lengths, count)
        drafted = dict(zip(self._rows.uids, drafts, strict=True))
        return [drafted[uid] if uid in rows else [] for uid in uids]

    def _draft(
        self, pairs: dict[int, _Pairs], tokens: dict[int, tuple[Tokens, int]], lengths: list[int], count: int
    ) -> list[list[int]]:
        """Run each row's pairs, and then the head's own, one after the other."""
        rows, width = self._rows, max(lengths)
        ids = [_ids(pairs[uid], *tokens[uid]) if length else [] for uid, length in zip(rows.uids, lengths, strict=True)]
        padded = self._known([[*row, *[0] * (width - len(row))] for row in ids])
        hidden = self._head.hidden(self._states(pairs, lengths, width))
        states = self._head(padded, hidden, rows.caches)
        rows.ran(lengths, width)
        last = mx.array([max(0, length - 1) for length in lengths])
        state = mx.take_along_axis(states, last[:, None, None], axis=1)
        drafted = [self._next(state, 0)]
        for ahead in range(1, count):
            state = self._head(drafted[-1][:, None], state, rows.caches)
            drafted.append(self._next(state, ahead))
        rows.give_back(count - 1)
        columns: Any = mx.stack(drafted, axis=1).tolist()
        return columns

    def _next(self, state: mx.array, ahead: int) -> mx.array:
        assert self._draw is not None
        return self._draw(self._rows.uids, self._head.logits(state)[:, 0], ahead)

    def _states(self, pairs: dict[int, _Pairs], lengths: Sequence[int], width: int) -> mx.array:
        """The target's states of all rows, `[rows, width, size]`."""
        rows = [pairs[uid] if length else None for uid, length in zip(self._rows.uids, lengths, strict=True)]
        whole = _whole(rows)
        if whole is not None:
            record, begins = whole
            at = mx.minimum(mx.array(begins)[:, None] + mx.arange(width), record.states.shape[1] - 1)
            return mx.take_along_axis(record.states, at[..., None], axis=1)
        some = next(row for row in rows if row is not None).states()
        filled = [mx.zeros((0, some.shape[-1]), some.dtype) if row is None else row.states() for row in rows]
        return mx.stack([mx.pad(row, [(0, width - row.shape[0]), (0, 0)]) for row in filled])

    def _pairs(self, uid: int, end: int) -> _Pairs:
        """Pairs of a row up to the last known token, as far back as there are states, or as they have not run."""
        done, need, parts = self._rows.done.get(uid, 0), end, list[tuple[Record, int, int, int]]()
        for record in reversed(self.taps.records):
            if need <= done:
                break
            if uid not in record.uids:
                continue
            row = record.uids.index(uid)
            start, length = record.starts[row], record.lengths[row]
            if start < need <= start + length:
                low = max(start, done)
                begin = record.begins[row] - start
                parts.append((record, row, begin + low, begin + need))
                need = low
        return _Pairs(need, parts[::-1])

    def _place(self, uid: int, pairs: _Pairs, text: Tokens, newest: int) -> None:
        """A row in the batch of the head whose next pair is the first of these."""
        if pairs.parts and self._rows.done.get(uid) == pairs.begin:
            return
        self.discard(uid)  # there is a gap: what has run is not what comes before
        if not pairs.parts:
            return
        caches, count = self._head.make_caches(), pairs.count
        if count > _ALONE:
            ids = self._known([_ids(pairs, text, newest)[:-1]])
            self._head(ids, self._head.hidden(pairs.states()[None, :-1]), caches)
            mx.eval([cache.state for cache in caches])
            record, row, _, high = pairs.parts[-1]
            pairs.parts, pairs.begin = [(record, row, high - 1, high)], pairs.begin + count - 1
        self._rows.join(uid, caches, pairs.begin)

    def _known(self, ids: list[list[int]]) -> mx.array:
        """Ids that there are embeddings of: the placeholder of a medium may lie beyond the table."""
        return mx.minimum(mx.array(ids, dtype=mx.uint32), self._head.tokens - 1)

    def _probe(self, dtype: mx.Dtype) -> int:
        """Bytes of KV that a token of a row takes."""
        caches = self._head.make_caches()
        self._head(mx.array([[0]]), mx.zeros((1, 1, self._head.size), dtype), caches)
        arrays: list[Any] = [array for cache in caches for array in cache.state[:2]]
        return sum(array[..., :1, :].nbytes for array in arrays)


def _ids(pairs: _Pairs, text: Tokens, newest: int) -> list[int]:
    """The token after each hidden state."""
    return [*text[pairs.begin + 1 :].tolist(), newest]


def _whole(rows: Sequence[_Pairs | None]) -> tuple[Record, list[int]] | None:
    """The record of which each row's pairs are a part, row by row, with the column at which they begin."""
    first = next(row.parts[0][0] for row in rows if row is not None)
    begins: list[int] = []
    for at, row in enumerate(rows):
        if row is None or len(row.parts) != 1 or row.parts[0][0] is not first or row.parts[0][1] != at:
            return None
        begins.append(row.parts[0][2])
    return (first, begins) if len(rows) == len(first.uids) else None
