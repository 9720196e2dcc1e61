"""Drafts of whole blocks, for the rows of a batch: one forward pass of the drafter per block."""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from worker.speculation.drafters.block_head import BlockHead
from worker.speculation.drafters.row_caches import bytes_per_token, columns
from worker.speculation.drafters.state_drafts import PendingStates, StateDrafts
from worker.speculation.text_sources.lookup import DraftSource

# Number of a prompt's last tokens whose states a block attends to.
_PROMPT_TAIL_TOKENS: Final = 512


class BlockDrafts(StateDrafts):
    """Proposer that uses a drafter of the DFlash family."""

    def __init__(self, head: BlockHead, size: int, dtype: mx.Dtype) -> None:
        """`size` is the width of the target's hidden states; the drafter takes those of several layers."""
        super().__init__(DraftSource.BLOCK, head.tokens, head.make_caches, _PROMPT_TAIL_TOKENS)
        self._head = head
        self.longest = head.longest
        caches = head.make_caches()
        head.keep(mx.zeros((1, 1, size * len(head.places)), dtype), caches)
        self.token_bytes = bytes_per_token(caches)

    def _run(self, states: PendingStates, caches: list[Any]) -> None:
        self._head.keep(states.joined()[None, :-1], caches)

    def _draft(self, rows: Sequence[PendingStates | None], lengths: Sequence[int], count: int) -> list[list[int]]:
        anchors = self._inputs([[0 if states is None else states.newest] for states in rows])
        hidden = self._head(anchors, self._batched(rows, max(lengths)), lengths, self._rows.caches, count)
        self._rows.accept(lengths)
        return columns(self._head.choose(hidden, anchors, self._drawn))
