"""Drafts by a head, for the rows of a batch: one forward pass of the head a token.

What runs through the head are pairs: the target's hidden state of a position, and the token after it. Pairs of a draft
are made of the head's own states, and are taken back when it is made: the next draft begins with the target's states of
what was accepted.
"""

from typing import Any, Protocol

import mlx.core as mx

from worker.kv.kv import leaves
from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafters.hidden_states import HiddenStateCapture
from worker.speculation.drafters.state_drafts import StateDrafts, States
from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import DraftSource


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


class HeadDrafts(StateDrafts):
    """Proposer of a target with a head, which was trained for one token, and feeds on its own draft for more."""

    def __init__(
        self, head: Feeding, taps: HiddenStateCapture, dtype: mx.Dtype, source: str = DraftSource.HEAD
    ) -> None:
        super().__init__(taps, source, head.tokens)
        self._head = head
        self.token_bytes = self._probe(dtype)

    def _make_caches(self) -> list[Any]:
        return self._head.make_caches()

    def _run(self, states: States, text: Tokens, newest: int, caches: list[Any]) -> None:
        ids = self._known([_ids(states, text, newest)[:-1]])
        self._head(ids, self._head.hidden(states.joined()[None, :-1]), caches)

    def _draft(
        self,
        states: dict[DraftedRow, States],
        tokens: dict[DraftedRow, tuple[Tokens, int]],
        lengths: list[int],
        count: int,
    ) -> list[list[int]]:
        """Run each row's pairs, and then the head's own, one after the other."""
        rows, width = self._rows, max(lengths)
        ids = [
            _ids(states[row], *tokens[row]) if length else [] for row, length in zip(rows.rows, lengths, strict=True)
        ]
        padded = self._known([[*row, *[0] * (width - len(row))] for row in ids])
        hidden = self._head.hidden(self._batched(states, lengths, width))
        own = self._head(padded, hidden, rows.caches)
        rows.ran(lengths, width)
        last = mx.array([max(0, length - 1) for length in lengths])
        state = mx.take_along_axis(own, last[:, None, None], axis=1)
        drafted = [self._next(state, 0)]
        for ahead in range(1, count):
            state = self._head(drafted[-1][:, None], state, rows.caches)
            drafted.append(self._next(state, ahead))
        rows.give_back(count - 1)
        columns: Any = mx.stack(drafted, axis=1).tolist()
        return columns

    def _next(self, state: mx.array, ahead: int) -> mx.array:
        assert self._draw is not None
        return self._draw(self._rows.rows, self._head.logits(state)[:, 0], ahead)

    def _probe(self, dtype: mx.Dtype) -> int:
        """Bytes of KV that a token of a row takes."""
        caches = self._head.make_caches()
        self._head(mx.array([[0]]), mx.zeros((1, 1, self._head.size), dtype), caches)
        arrays: list[Any] = [array for leaf in leaves(caches) for array in leaf.state[:2]]
        return sum(array[..., :1, :].nbytes for array in arrays)


def _ids(states: States, text: Tokens, newest: int) -> list[int]:
    """The token after each hidden state."""
    return [*text[states.begin + 1 :].tolist(), newest]
