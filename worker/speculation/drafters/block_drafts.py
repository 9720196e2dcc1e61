"""Drafts of whole blocks, for the rows of a batch: one forward pass of the drafter per block."""

from typing import Any, Final

import mlx.core as mx

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafters.block_head import BlockHead
from worker.speculation.drafters.row_caches import bytes_per_token, columns
from worker.speculation.drafters.state_drafts import PendingStates, StateDrafts
from worker.speculation.text_sources.indexed_text import Tokens
from worker.speculation.text_sources.lookup import DraftSource

# A block attends to states of at most this many last tokens of a prompt.
_PROMPT_TAIL_TOKENS: Final = 512


class BlockDrafts(StateDrafts):
    """Proposer with a drafter of the DFlash family."""

    def __init__(self, head: BlockHead, size: int, dtype: mx.Dtype) -> None:
        """`size` is the size of the target's hidden states, of which the drafter takes several."""
        super().__init__(DraftSource.BLOCK, head.tokens, _PROMPT_TAIL_TOKENS)
        self._head = head
        self.longest = head.longest
        caches = head.make_caches()
        head.keep(mx.zeros((1, 1, size * len(head.places)), dtype), caches)
        self.token_bytes = bytes_per_token(caches)

    def _make_caches(self) -> list[Any]:
        return self._head.make_caches()

    def _run(self, states: PendingStates, text: Tokens, newest: int, caches: list[Any]) -> None:
        self._head.keep(states.joined()[None, :-1], caches)

    def _draft(
        self,
        states: dict[DraftedRow, PendingStates],
        tokens: dict[DraftedRow, tuple[Tokens, int]],
        lengths: list[int],
        count: int,
    ) -> list[list[int]]:
        rows, width = self._rows, max(lengths)
        anchors = self._inputs(
            [[tokens[row][1] if length else 0] for row, length in zip(rows.rows, lengths, strict=True)]
        )
        hidden = self._head(anchors, self._batched(states, lengths, width), lengths, rows.caches, count)
        rows.accept(lengths, width)
        return columns(self._head.choose(hidden, anchors, self._drawn))
