"""Drafts of a block at once, for the rows of a batch."""

from typing import Any, Final

import mlx.core as mx

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafters.block_head import BlockHead
from worker.speculation.drafters.hidden_states import HiddenStateCapture
from worker.speculation.drafters.state_drafts import StateDrafts, States
from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import DraftSource

# Of a prompt, a block sees the last tokens that were computed.
TAIL: Final = 512


class BlockDrafts(StateDrafts):
    """Proposer of a target with a drafter of the DFlash family."""

    def __init__(self, head: BlockHead, taps: HiddenStateCapture, size: int, dtype: mx.Dtype) -> None:
        """`size` is that of the tapped states, side by side."""
        super().__init__(taps, DraftSource.BLOCK, head.tokens)
        self._head = head
        self.longest = head.longest
        caches = head.make_caches()
        head.keep(mx.zeros((1, 1, size), dtype), caches)
        arrays: list[Any] = [array for cache in caches for array in cache.state[:2]]
        self.token_bytes = sum(array[..., :1, :].nbytes for array in arrays)

    def _make_caches(self) -> list[Any]:
        return self._head.make_caches()

    def _run(self, states: States, text: Tokens, newest: int, caches: list[Any]) -> None:
        self._head.keep(states.joined()[None, :-1], caches)

    def _draft(
        self,
        states: dict[DraftedRow, States],
        tokens: dict[DraftedRow, tuple[Tokens, int]],
        lengths: list[int],
        count: int,
    ) -> list[list[int]]:
        rows, width = self._rows, max(lengths)
        anchors = self._known(
            [[tokens[row][1] if length else 0] for row, length in zip(rows.rows, lengths, strict=True)]
        )
        hidden = self._head(anchors, self._batched(states, lengths, width), lengths, rows.caches, count)
        rows.ran(lengths, width)
        drafted: Any = mx.stack(self._head.choose(hidden, anchors, self._choose), axis=1).tolist()
        return drafted

    def _choose(self, logits: mx.array, ahead: int) -> mx.array:
        assert self._draw is not None
        return self._draw(self._rows.rows, logits, ahead)
