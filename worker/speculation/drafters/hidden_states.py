"""Taps: hidden states of the target on their way between its layers, for drafters that go on from them.

A module is wrapped once, when the model is loaded, and its input kept while somebody drafts. A record says of each row
where in its text the states are. States of tokens that were rejected are in it as well: who reads it knows the text.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from worker.speculation.draft_state import DraftState

# Of a prompt, states of its last tokens are kept: so many for a drafter that looks at what is near.
TAIL: Final = 256
# Records are forgotten, oldest first, read or not.
_MOST_RECORDS: Final = 256
_MOST_BYTES: Final = 64 << 20


@dataclass(slots=True, frozen=True)
class CapturedStates:
    """Inputs of the tapped modules in one forward pass, side by side, `[rows, width, size]`: of row i the tokens of its
    text from `starts[i]` on, `lengths[i]` of them from column `begins[i]`."""

    rows: Sequence[DraftState]
    starts: Sequence[int]
    begins: Sequence[int]
    lengths: Sequence[int]
    states: mx.array

    @property
    def nbytes(self) -> int:
        return self.states.nbytes


class HiddenStateCapture:
    """Records of the newest forward passes; of a prompt, of its last `tail` tokens. Owned by the engine thread."""

    def __init__(self, tail: int = TAIL) -> None:
        self._tail = tail
        # Nobody reads: nothing is kept.
        self.is_on = False
        self.records: deque[CapturedStates] = deque()
        self.nbytes = 0
        self._seen: dict[int, mx.array] = {}

    def see(self, place: int, x: mx.array) -> None:
        if self.is_on:
            self._seen[place] = x

    def take(self) -> tuple[mx.array, ...]:
        """Take the inputs of the tapped modules in the pass just built, in the order of their places."""
        seen, self._seen = self._seen, {}
        return tuple(state for _, state in sorted(seen.items()))

    def keep(
        self,
        states: tuple[mx.array, ...],
        rows: Sequence[DraftState],
        starts: Sequence[int],
        lengths: Sequence[int],
        left: Sequence[int],
        *,
        is_packed: bool = False,
    ) -> None:
        """Keep states `[rows, width, size]` of a pass, or of its part where it was packed; `left` are the tokens of
        each row's prompt that follow it."""
        near = [min(length, self._tail - after) for length, after in zip(lengths, left, strict=True)]
        if max(near) <= 0:
            return
        width, begin = states[0].shape[1], min(length - count for length, count in zip(lengths, near, strict=True))
        if is_view := width > 1 or is_packed:
            # Left alone, they would hold all that they come from: a whole prompt, or the other parts of the pass.
            states = tuple(mx.contiguous(state[:, begin:]) for state in states)
        side_by_side = states[0] if len(states) == 1 else mx.concatenate(list(states), axis=-1)
        if is_view:
            mx.async_eval(side_by_side)
        begins = [max(0, length - max(count, 0) - begin) for length, count in zip(lengths, near, strict=True)]
        self._add(CapturedStates(rows, [start + begin + at for start, at in zip(starts, begins, strict=True)], begins,
                         [max(count, 0) for count in near], side_by_side))  # fmt: skip

    def clear(self) -> None:
        self.records.clear()
        self._seen.clear()
        self.nbytes = 0

    def _add(self, record: CapturedStates) -> None:
        self.records.append(record)
        self.nbytes += record.nbytes
        while self.nbytes > _MOST_BYTES or len(self.records) > _MOST_RECORDS:
            self.nbytes -= self.records.popleft().nbytes


class CapturePoint(nn.Module):
    """A module whose input is kept; its attributes are shown as the tap's own."""

    def __init__(self, module: Any, taps: HiddenStateCapture, place: int) -> None:
        super().__init__()
        self.module = module
        self._taps = taps
        self._place = place

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        self._taps.see(self._place, x)
        return self.module(x, *args, **kwargs)


def taps_of(model: Any) -> HiddenStateCapture | None:
    """The taps of a model that somebody drafts for."""
    taps: HiddenStateCapture | None = getattr(model, "taps", None)
    return taps if taps is not None and taps.is_on else None
