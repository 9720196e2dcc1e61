"""Forward pass: the one place where a model is called."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.engine.row import BatchSequence
from worker.kv.batched import begin_block, end_block, place
from worker.model.lora.adapters import adapted
from worker.model.packing import PackedRows, Shape, packing_of, split
from worker.speculation.drafters.target import capture_of
from worker.vision.multimodal_merge import merge_of


@dataclass(slots=True)
class ForwardPart:
    """Rows of a forward pass with their next tokens `[rows, width]`, which the pass adds to their caches.

    Row i begins in slot `len(sequences[i].tokens)`, which is also its position unless its prompt is sparse. The row has
    `lengths[i]` tokens, then padding. Caches that keep tokens one by one hold the padding until they are rewound.
    """

    sequences: Sequence[BatchSequence]
    inputs: mx.array
    caches: list[Any]
    lengths: Sequence[int]

    @property
    def width(self) -> int:
        return self.inputs.shape[1]

    @property
    def excess(self) -> list[int]:
        """Number of padding tokens of each row."""
        return [self.width - length for length in self.lengths]


def can_pack(model: Any) -> bool:
    """Whether two parts without media can share one pass."""
    return packing_of(model) is not None


def has_media(sequences: Sequence[BatchSequence]) -> bool:
    """Whether a forward pass of these sequences needs the multimodal merge."""
    return any(sequence.placement is not None for sequence in sequences)


def forward(model: Any, part: ForwardPart, prefill: ForwardPart | None = None) -> mx.array:
    """Return logits `[rows, length, vocab]` of `part`; `length` is the length of its longest row.

    Tokens of `prefill` go through the weights in the same pass; their logits are not computed.
    """
    parts = [part] if prefill is None else [part, prefill]
    shapes = [(len(each.sequences), each.width) for each in parts]
    for each in parts:
        if any(sequence.row.kept is not None for sequence in each.sequences):
            place(each.caches, [sequence.skipped for sequence in each.sequences])
        begin_block(each.caches, each.lengths, each.width)
    tokens, caches = (part.inputs, part.caches) if prefill is None else _packed(parts, shapes)
    packing, wanted = packing_of(model), max(part.lengths)
    with (
        _merged_media(model, part),
        packing.first(shapes, wanted) if packing is not None else nullcontext(),
        adapted(model, lambda: [[sequence.row.adapter_slot for sequence in each.sequences] for each in parts], shapes),
    ):
        logits: mx.array = model(tokens, cache=caches)
    _keep_hidden_states(model, parts, shapes)
    for each in parts:
        end_block(each.caches, each.lengths, each.width)
    return logits[:, :wanted]


def _keep_hidden_states(model: Any, parts: Sequence[ForwardPart], shapes: Sequence[Shape]) -> None:
    """Keep the hidden states of the pass for drafters."""
    capture = capture_of(model)
    if capture is None or not (taken := capture.take_inputs()):
        return
    if any(sequence.row.questions is not None for part in parts for sequence in part.sequences):
        return  # rows with questions have no drafts
    for part, states in zip(parts, zip(*(split(state, shapes) for state in taken), strict=True), strict=True):
        pairs = zip(part.sequences, part.lengths, strict=True)
        left = [max(0, sum(map(len, sequence.segments)) - length) for sequence, length in pairs]
        starts = [len(sequence.tokens) for sequence in part.sequences]
        rows = [sequence.draft for sequence in part.sequences]
        capture.keep(states, rows, starts, part.lengths, left, is_packed=len(parts) > 1)


def _packed(parts: Sequence[ForwardPart], shapes: Sequence[Shape]) -> tuple[mx.array, list[Any]]:
    tokens = mx.concatenate([part.inputs.reshape(1, -1).astype(mx.uint32) for part in parts], axis=1)
    return tokens, [PackedRows(layer, shapes) for layer in zip(*(part.caches for part in parts), strict=True)]


def _merged_media(model: Any, part: ForwardPart) -> AbstractContextManager[None]:
    merge = merge_of(model)
    if merge is None or not has_media(part.sequences):
        return nullcontext()
    starts = [len(sequence.tokens) for sequence in part.sequences]
    return merge.rows([sequence.placement for sequence in part.sequences], starts, part.lengths, part.width)
