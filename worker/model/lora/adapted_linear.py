"""Linear layer whose rows add their own adapters."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from worker.model.linears import LinearPlace
from worker.model.lora.slots import SlotChoice, Slots, StackedWeights
from worker.model.packing import split


class AdaptedLinear(nn.Module):
    """Linear layer with the updates of adapters.

    The wrapped layer is only reachable by calls: code that reads the weights directly would ignore the adapter.
    """

    def __init__(self, linear: Any, place: LinearPlace, slots: Slots, stacked: StackedWeights) -> None:
        super().__init__()
        self.linear = linear
        self._place = place
        self._slots = slots
        # StackedWeights is not a module, so its arrays are not parameters of the model.
        self.stacked = stacked

    def __call__(self, x: mx.array) -> mx.array:
        y: mx.array = self.linear(x)
        choices = self._slots.choices
        return y if choices is None else self._updated(x, y, choices)

    def _updated(self, x: mx.array, y: mx.array, choices: Sequence[SlotChoice | None]) -> mx.array:
        turn = self._slots.turn.at
        if len(choices) == 1 or self._place.is_head or turn is not None:
            # The head only gets tokens of the first part of the pass, so the first choice applies.
            return self._add(x, y, choices[0 if self._place.is_head else turn or 0])
        shapes = self._slots.shapes
        flat_x, flat_y = x.reshape(1, -1, x.shape[-1]), y.reshape(1, -1, y.shape[-1])
        if flat_x.shape[1] != sum(rows * width for rows, width in shapes):
            raise ValueError(f"{self._place.path} is given other tokens than those of the pass")
        parts = zip(split(flat_x, shapes), split(flat_y, shapes), choices, strict=True)
        added = [self._add(own_x, own_y, choice).reshape(1, -1, y.shape[-1]) for own_x, own_y, choice in parts]
        return mx.concatenate(added, axis=1).reshape(y.shape)

    def _add(self, x: mx.array, y: mx.array, choice: SlotChoice | None) -> mx.array:
        """Add to `y` the updates for a part's rows, whose tokens are consecutive in `x`."""
        stacked = self.stacked
        if choice is None or choice.used.isdisjoint(stacked.updates):
            return y
        if choice.single is not None:
            own = stacked.updates[choice.single]
            return self._scaled(y, own.gain) + ((x @ own.a) @ own.b).astype(y.dtype)
        slots = choice.within(stacked.slots)
        rows, by_row = x.reshape(choice.rows, -1, x.shape[-1]), y.reshape(choice.rows, -1, y.shape[-1])
        if self._slots.gathers:
            z = mx.gather_mm(mx.gather_mm(rows, stacked.a, rhs_indices=slots), stacked.b, rhs_indices=slots)
        else:
            z = (rows @ stacked.a[slots]) @ stacked.b[slots]
        gain = None if stacked.gain is None else stacked.gain[slots][:, None]
        return (self._scaled(by_row, gain) + z.astype(y.dtype)).reshape(y.shape)

    def _scaled(self, y: mx.array, gain: mx.array | None) -> mx.array:
        """Scale the layer's own output. A gain of 1 leaves it bit-identical."""
        if gain is None:
            return y
        return y * gain + self.linear.bias * (1 - gain) if "bias" in self.linear else y * gain
