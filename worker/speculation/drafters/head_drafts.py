"""Drafts by a head, for the rows of a batch: one forward pass of the head per token.

The head runs on pairs: the target's hidden state at a position, and the token after it. For a draft it continues with
its own states, which are removed from its caches afterwards: the next draft begins with the target's states of the
accepted tokens.
"""

from typing import Any, Protocol

import mlx.core as mx

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafters.row_caches import bytes_per_token, columns, last_of
from worker.speculation.drafters.state_drafts import PendingStates, StateDrafts
from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import DraftSource


class DraftHead(Protocol):
    """Head that is fed with hidden states and the tokens after them, then with its own states.

    `size` is the size of its hidden states, `tokens` the number of ids in its embedding table.
    """

    size: int
    tokens: int

    def make_caches(self) -> list[Any]: ...

    def hidden(self, states: mx.array) -> mx.array:
        """Convert captured states to hidden states that the head takes."""
        ...

    def __call__(self, tokens: mx.array, hidden: mx.array, caches: list[Any]) -> mx.array: ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits as wide as the target's."""
        ...


class HeadDrafts(StateDrafts):
    """Proposer with a head. The head was trained for one token; for more, it continues from its own draft."""

    def __init__(self, head: DraftHead, dtype: mx.Dtype, source: str = DraftSource.HEAD) -> None:
        super().__init__(source, head.tokens)
        self._head = head
        caches = head.make_caches()
        head(mx.array([[0]]), mx.zeros((1, 1, head.size), dtype), caches)
        self.token_bytes = bytes_per_token(caches)

    def _make_caches(self) -> list[Any]:
        return self._head.make_caches()

    def _run(self, states: PendingStates, text: Tokens, newest: int, caches: list[Any]) -> None:
        ids = self._inputs([_ids(states, text, newest)[:-1]])
        self._head(ids, self._head.hidden(states.joined()[None, :-1]), caches)

    def _draft(
        self,
        states: dict[DraftedRow, PendingStates],
        tokens: dict[DraftedRow, tuple[Tokens, int]],
        lengths: list[int],
        count: int,
    ) -> list[list[int]]:
        rows, width = self._rows, max(lengths)
        ids = [
            _ids(states[row], *tokens[row]) if length else [] for row, length in zip(rows.rows, lengths, strict=True)
        ]
        hidden = self._head.hidden(self._batched(states, lengths, width))
        state = last_of(self._head(self._inputs(ids), hidden, rows.caches), lengths)
        rows.accept(lengths, width)
        drafted = [self._drawn(self._head.logits(state)[:, 0], 0)]
        for position in range(1, count):
            state = self._head(drafted[-1][:, None], state, rows.caches)
            drafted.append(self._drawn(self._head.logits(state)[:, 0], position))
        rows.rewind(count - 1)
        return columns(drafted)


def _ids(states: PendingStates, text: Tokens, newest: int) -> list[int]:
    """Return the token after each hidden state."""
    return [*text[states.begin + 1 :].tolist(), newest]
