"""The model's forward pass: the one place where a model is called."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.engine.row import BatchSequence
from worker.kv.batched import begin_block, end_block, place
from worker.model.lora.adapters import adapted
from worker.model.packing import PackedRows, Shape, packing_of, split
from worker.speculation.drafters.hidden_states import capture_of
from worker.vision.multimodal_merge import graft_of


@dataclass(slots=True)
class ForwardPart:
    """Rows of a forward pass with their next tokens `[rows, width]`, which their caches then hold.

    Row i begins in slot `len(sequences[i].tokens)`, which is its position as well unless its prompt is sparse. It has
    `lengths[i]` tokens; what follows is padding, which caches that keep tokens one by one hold until they are rewound.
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
        """Tokens of padding behind each row."""
        return [self.width - length for length in self.lengths]


def can_pack(model: Any) -> bool:
    """Whether two parts can be one pass, where neither has rows with media."""
    return packing_of(model) is not None


def has_media(sequences: Sequence[BatchSequence]) -> bool:
    """Whether a pass of these needs the graft."""
    return any(sequence.placement is not None for sequence in sequences)


def forward(model: Any, part: ForwardPart, prefill: ForwardPart | None = None) -> mx.array:
    """Logits `[rows, length, vocab]` of what follows the tokens of a part, up to its longest row.

    A prefill's tokens go through the weights together with them; its logits are not made.
    """
    parts = [part] if prefill is None else [part, prefill]
    for each in parts:
        if any(sequence.row.kept is not None for sequence in each.sequences):
            place(each.caches, [sequence.ahead for sequence in each.sequences])
        begin_block(each.caches, each.lengths, each.width)
    tokens, caches = (part.inputs, part.caches) if prefill is None else _packed(parts)
    packing, wanted = packing_of(model), max(part.lengths)
    shapes = [(len(each.sequences), each.width) for each in parts]
    with (
        _placed(model, part),
        packing.first(shapes, wanted) if packing is not None else nullcontext(),
        adapted(model, lambda: [[sequence.row.adapter_slot for sequence in each.sequences] for each in parts], shapes),
    ):
        logits: mx.array = model(tokens, cache=caches)
    _tap(model, parts, shapes)
    for each in parts:
        end_block(each.caches, each.lengths, each.width)
    return logits[:, :wanted]


def _tap(model: Any, parts: Sequence[ForwardPart], shapes: Sequence[Shape]) -> None:
    """Keep the hidden states of the pass for those who draft."""
    capture = capture_of(model)
    if capture is None or not (taken := capture.take_inputs()):
        return
    for part, states in zip(parts, zip(*(split(state, shapes) for state in taken), strict=True), strict=True):
        pairs = zip(part.sequences, part.lengths, strict=True)
        left = [max(0, sum(map(len, row.segments)) - length) for row, length in pairs]
        starts = [len(sequence.tokens) for sequence in part.sequences]
        rows = [sequence.draft for sequence in part.sequences]
        capture.keep(states, rows, starts, part.lengths, left, is_packed=len(parts) > 1)


def _packed(parts: Sequence[ForwardPart]) -> tuple[mx.array, list[Any]]:
    shapes = [(len(part.sequences), part.width) for part in parts]
    tokens = mx.concatenate([part.inputs.reshape(1, -1).astype(mx.uint32) for part in parts], axis=1)
    return tokens, [PackedRows(layer, shapes) for layer in zip(*(part.caches for part in parts), strict=True)]


def _placed(model: Any, part: ForwardPart) -> AbstractContextManager[None]:
    graft = graft_of(model)
    if graft is None or not has_media(part.sequences):
        return nullcontext()
    starts = [len(sequence.tokens) for sequence in part.sequences]
    return graft.rows([sequence.placement for sequence in part.sequences], starts, part.lengths, part.width)
