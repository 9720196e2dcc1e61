"""Drafts by a prediction head, for the rows of a batch: one forward pass of the head per token.

An input of the head is a pair: the target's hidden state at a position, and the token after it. Within a draft the head
uses its own states instead. Its own states are removed from its caches afterwards, because the next draft begins with
the target's states of the accepted tokens.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from worker.speculation.drafters.row_caches import bytes_per_token, columns, last_of
from worker.speculation.drafters.state_drafts import PendingStates, StateDrafts
from worker.speculation.text_sources.lookup import DraftSource


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
