"""Rows of unequal lengths with random numbers, for the attention kernels."""

from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from worker.attention.kernel import GROUP, LayerKV


@dataclass(slots=True, frozen=True)
class Rows:
    queries: mx.array
    kv: LayerKV
    lengths: mx.array
    end: int
    scale: float
    sinks: mx.array | None

    def row(self, at: int) -> "Rows":
        """One of them alone, in a room of its own."""
        keys, values = ([array[at : at + 1] for array in arrays] for arrays in (self.kv.keys, self.kv.values))
        length = self.lengths[at : at + 1]
        end = cast(int, length.item()) + self.queries.shape[2]
        return Rows(self.queries[at : at + 1], LayerKV(keys, values, self.kv.bits), length, end, self.scale, self.sinks)

    def token(self, at: int) -> "Rows":
        """One of each row's new tokens alone, behind those before it."""
        end = self.end - self.queries.shape[2] + at + 1
        return Rows(self.queries[:, :, at : at + 1], self.kv, self.lengths + at, end, self.scale, self.sinks)


def rows(
    lengths: tuple[int, ...], tokens: int, dim: int, dtype: str = "float32", heads: int = 4, kv_heads: int = 2,
    room: int = 768, bits: int = 0, has_sinks: bool = False, seed: int = 0,
) -> Rows:  # fmt: skip
    random, kind = np.random.default_rng(seed), getattr(mx, dtype)

    def numbers(*shape: int) -> mx.array:
        return mx.array(random.normal(size=shape).astype(np.float32)).astype(kind)

    queries = numbers(len(lengths), heads, tokens, dim)
    kv = [numbers(len(lengths), kv_heads, room, dim) for _ in range(2)]
    # Slots behind a row are not numbers: whatever stands there, no row may see it.
    behind = mx.arange(room)[:, None] >= mx.array(lengths)[:, None, None, None] + tokens
    keys, values = (
        mx.quantize(each, group_size=GROUP, bits=bits) if bits else (mx.where(behind, mx.array(mx.nan, kind), each),)
        for each in kv
    )
    sinks = numbers(heads) if has_sinks else None
    return Rows(
        queries, LayerKV(keys, values, bits), mx.array(lengths, dtype=mx.int32), max(lengths) + tokens, dim**-0.5, sinks
    )


def deviation(output: mx.array, expected: mx.array) -> float:
    """Largest difference, as a part of the largest number."""
    output, expected = output.astype(mx.float32), expected.astype(mx.float32)
    assert mx.all(mx.isfinite(output)).item()
    return cast(float, (mx.max(mx.abs(output - expected)) / mx.max(mx.abs(expected))).item())
