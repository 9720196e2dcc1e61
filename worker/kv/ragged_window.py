"""Batch cache of a sliding window whose rows can be rewound by different numbers of tokens."""

from collections.abc import Sequence
from typing import Self, cast

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache
from mlx_lm.models.cache import dynamic_roll as roll_rows


class RaggedWindowCache(BatchRotatingKVCache):
    """Batch form of mlx-lm's sliding window, with rewinds, and without a mask where none is needed.

    `held` has the total number of tokens of each row, including tokens that have left the window.
    """

    held: list[int]

    @classmethod
    def merge(cls, caches: Sequence[RotatingKVCache]) -> Self:
        merged = super().merge(caches)
        merged.held = [cache.offset for cache in caches]
        return merged

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.held = [length + keys.shape[2] for length in self.held]
        return cast(tuple[mx.array, mx.array], super().update_and_fetch(keys, values))

    def make_mask(
        self,
        N: int,  # noqa: N803 - the name in mlx-lm
        window_size: int | None = None,
        return_array: bool = False,
    ) -> mx.array | str | None:
        if not return_array and window_size in (None, self.max_size):
            if N == 1 and min(self.held) + 1 >= min(self._offset + 1, self.max_size):
                return None
            if N > 1 and min(self.held) == self._offset and self._offset + N <= self.max_size:
                return "causal"
        return cast(mx.array, super().make_mask(N, window_size, return_array))

    def begin(self, _lengths: Sequence[int], count: int) -> None:
        """Put the buffer in temporal order before a pass of several tokens.

        mlx-lm reorders the buffer when it stores the tokens, but makes their mask before: for a rotated buffer, that
        mask hides the oldest token.
        """
        if count > 1:
            self._temporal_order()

    def rewind(self, drop: tuple[int, ...]) -> None:
        """Remove the newest `drop[i]` tokens of row i, at most the tokens of the newest block.

        The buffer still has the window before the block, which becomes visible again.
        """
        if not any(drop):
            return
        size = self.keys.shape[2]
        common = min(drop) if size == self._offset else min(*drop, max(0, size - self.max_size))
        if common:
            self.keys, self.values = self.keys[..., : size - common, :], self.values[..., : size - common, :]
            self.offset = self.offset - common
            self._offset -= common
            self._idx -= common
        rest = [less - common for less in drop]
        if any(rest):
            roll = mx.array(rest)
            self.keys = roll_rows(self.keys, roll[:, None], axis=2)
            self.values = roll_rows(self.values, roll[:, None], axis=2)
            self.left_padding = self.left_padding + roll
            self.offset = self.offset - roll
        self.held = [length - less for length, less in zip(self.held, drop, strict=True)]

    def contents(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return the same as `RaggedKVCache.contents`, with slots in the order of the buffer."""
        slots, end = mx.arange(self.keys.shape[2], dtype=mx.int32), self._idx
        if self.rotated:
            slots, end = (slots - end) % self.max_size, self.max_size
        held = mx.array(self.held)[:, None]
        positions = held - end + slots
        is_held = (slots < end) & (positions >= mx.maximum(held - self.max_size, 0))
        return self.keys, self.values, mx.where(is_held, positions, -1)

    def filter(self, batch_indices: Sequence[int]) -> None:
        super().filter(mx.array(list(batch_indices)))
        self.held = [self.held[row] for row in batch_indices]

    def extend(self, other: Self) -> None:
        super().extend(other)
        self.held = self.held + other.held

    def extract(self, idx: int) -> RotatingKVCache:
        """Return the same as mlx-lm's `extract`, but with views instead of copies."""
        if self.empty():
            return RotatingKVCache(self.max_size)
        views, end = [array[idx : idx + 1] for array in (self.keys, self.values)], self._idx
        if self.rotated:
            views, end = [mx.roll(view, -end, 2) for view in views], self.max_size
        begin = end - min(self.held[idx], self.max_size, end)
        keys, values = (view[:, :, begin:end] for view in views)
        state = (keys, values, self.held[idx], 0, self.max_size, int(keys.shape[2]))
        return RotatingKVCache.from_state(state)
