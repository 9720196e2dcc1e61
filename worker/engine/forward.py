"""The model's forward pass: the one place where a model is called."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from worker.cache.batched import begin_block, end_block
from worker.drafting.taps import taps_of
from worker.engine.member import Member
from worker.vision.graft import graft_of


def forward(
    model: Any, members: Sequence[Member], inputs: mx.array, caches: list[Any], lengths: Sequence[int] | None = None
) -> mx.array:
    """Logits `[rows, width, vocab]` of the next tokens `[rows, width]`, which the caches then hold.

    Row i begins at position `len(members[i].tokens)`. It has `lengths[i]` tokens, or all of them; what follows is
    padding, which caches that keep tokens one by one hold until they are rewound.
    """
    width = inputs.shape[1]
    lengths = lengths or [width] * len(members)
    begin_block(caches, lengths, width)
    graft = graft_of(model)
    if graft is None:
        logits = model(inputs, cache=caches)
    else:
        starts = [len(member.tokens) for member in members]
        with graft.rows([member.uid for member in members], starts, lengths, width):
            logits = model(inputs, cache=caches)
    taps = taps_of(model)
    if taps is not None:
        left = [max(0, sum(map(len, row.segments)) - length) for row, length in zip(members, lengths, strict=True)]
        starts = [len(member.tokens) for member in members]
        taps.keep([member.uid for member in members], starts, lengths, left)
    end_block(caches, lengths, width)
    return logits
