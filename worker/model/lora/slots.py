"""Linear layers with adapters: each row of a forward pass gets the update of its own adapter, or none.

An adapter has a slot, the same in all layers; slot 0 is the base model. For each adapted layer, the matrices of all
slots are one array, with zeros where a slot changes nothing. One multiplication can then serve rows of different
adapters. `Slots` holds the slot of each row, and is set around each forward pass.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx

from worker.model.packing import PackingTurn, Shape

BASE: Final = 0


class SlotChoice:
    """Adapter slots of the rows in one part of a packed pass. At least one row has an adapter."""

    __slots__ = ("_arrays", "_slots", "rows", "single", "used")

    def __init__(self, slots: Sequence[int]) -> None:
        self.rows = len(slots)
        self.used = frozenset(slots) - {BASE}
        # Slot of all rows if they have the same slot, otherwise None.
        self.single = slots[0] if len(set(slots)) == 1 else None
        self._slots = slots
        self._arrays: dict[int, mx.array] = {}

    def within(self, count: int) -> mx.array:
        """Return the slots `[rows]`, with slots from `count` on replaced by the base's: MLX checks no bounds."""
        array = self._arrays.get(count)
        if array is None:
            within = [slot if slot < count else BASE for slot in self._slots]
            array = self._arrays[count] = mx.array(within, dtype=mx.uint32)
        return array


@dataclass(frozen=True, slots=True, eq=False)
class Matrices:
    """Update of one layer by one adapter: `a` `[inputs, rank]`, and `b` `[rank, outputs]`, which includes the scale.

    With DoRA, the layer's own output is multiplied by `gain` `[outputs]`, which `b` already includes.
    """

    a: mx.array
    b: mx.array
    gain: mx.array | None = None

    @property
    def rank(self) -> int:
        return self.a.shape[1]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.a, self.b, *([self.gain] if self.gain is not None else [])]


class Slots:
    """Adapter slot of each row in the forward pass whose graph is being built. Owned by the engine thread."""

    def __init__(self, turn: PackingTurn | None) -> None:
        self.turn = turn or PackingTurn()
        # Only Metal gathers during the multiplication; on a CPU or CUDA each row gets a copy of its matrix.
        self.gathers = mx.metal.is_available()
        # Adapter slots of each part of the packed pass; None if all rows use the base model.
        self.choices: Sequence[SlotChoice | None] | None = None
        self.shapes: Sequence[Shape] = ()

    @contextmanager
    def rows(self, slots: Sequence[Sequence[int]], shapes: Sequence[Shape]) -> Generator[None]:
        """Set the adapter slots of each part's rows during a pass."""
        choices = [SlotChoice(part) if any(part) else None for part in slots]
        if any(choice is not None for choice in choices):
            self.choices, self.shapes = choices, shapes
        try:
            yield
        finally:
            self.choices = None


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeights:
    """Updates of one layer by slot, and evaluated arrays of all slots.

    Their shapes are `[slots, inputs, rank]`, `[slots, rank, outputs]` and, if some have a gain, `[slots, outputs]`.
    """

    updates: dict[int, Matrices]
    a: mx.array
    b: mx.array
    gain: mx.array | None

    @classmethod
    def of(cls, updates: dict[int, Matrices]) -> "StackedWeights":
        """Stack at least one update. The updates become views of the stacked arrays, so nothing is stored twice."""
        first = next(iter(updates.values()))
        rank = max(each.rank for each in updates.values())
        every = [updates.get(slot) for slot in range(max(updates) + 1)]
        shapes = (first.a.shape[0], rank), (rank, first.b.shape[1])
        a = mx.stack([_padded(None if each is None else each.a, shapes[0], first.a.dtype) for each in every])
        b = mx.stack([_padded(None if each is None else each.b, shapes[1], first.b.dtype) for each in every])
        gain = None
        if any(each.gain is not None for each in updates.values()):
            ones = mx.ones((first.b.shape[1],), dtype=first.b.dtype)
            gain = mx.stack([ones if each is None or each.gain is None else each.gain for each in every])
        own = {
            slot: Matrices(
                a[slot, :, : each.rank], b[slot, : each.rank], None if gain is None or each.gain is None else gain[slot]
            )
            for slot, each in updates.items()
        }
        mx.eval(a, b, *([gain] if gain is not None else []), [array for each in own.values() for array in each.arrays])
        return cls(own, a, b, gain)

    @property
    def slots(self) -> int:
        return self.a.shape[0]

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (self.gain.nbytes if self.gain is not None else 0)

    def changed(self, slot: int, matrices: Matrices | None) -> "StackedWeights | None":
        """Return a copy with another update, or no update, in a slot; None if no update is left."""
        updates = {at: each for at, each in self.updates.items() if at != slot}
        if matrices is not None:
            updates[slot] = matrices
        return StackedWeights.of(updates) if updates else None


def _padded(matrix: mx.array | None, shape: tuple[int, int], dtype: Any) -> mx.array:
    """Pad a matrix of a smaller rank with zeros to `shape`; None becomes zeros."""
    if matrix is None:
        return mx.zeros(shape, dtype=dtype)
    return mx.pad(matrix, [(0, want - have) for want, have in zip(shape, matrix.shape, strict=True)])
