"""Quantized KV: codes of 8 or 4 bits, with a scale and a bias for each group of numbers.

Groups lie along a head, so the codes of a token depend on that token alone: any prefix is a slice, and other rows,
padding and chunks change nothing. All tokens are quantized, so that an answer does not depend on memory pressure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache, make_prompt_cache

from worker.kv.ragged import Lengths, RaggedKVCache

_Codes = tuple[mx.array, mx.array, mx.array]
"""Codes, scales and biases."""


@dataclass(frozen=True, slots=True)
class KvForm:
    """Form of quantized KV: bits per code, group size, and how attention uses the codes.

    With `reads_codes`, attention of one token per row computes with the codes. Otherwise KV is dequantized for MLX's
    fused attention. It is also dequantized for several tokens per row, because mlx-lm would materialize their scores
    for all slots.
    """

    bits: int
    group: int
    reads_codes: bool = True

    def quantize(self, array: mx.array) -> _Codes:
        codes, scales, biases = mx.quantize(array, group_size=self.group, bits=self.bits)
        return codes, scales, biases

    def dequantize(self, codes: Sequence[mx.array]) -> mx.array:
        return mx.dequantize(*codes, group_size=self.group, bits=self.bits)


class QuantizedKV(RaggedKVCache):
    """Quantized KV of several rows, or of one sequence.

    `arrays` are the codes, scales and biases of the keys, then those of the values.
    """

    def __init__(self, form: KvForm, lengths: Lengths) -> None:
        super().__init__(lengths)
        self.form = form
        # Whether the newest pass got codes instead of dequantized KV.
        self._gives_codes = False

    @classmethod
    def merge(cls, caches: Sequence[Any], lengths: Lengths) -> Self:
        merged = cls(caches[0].form, lengths)
        merged._fill([cache.arrays for cache in caches])
        return merged

    @property
    def bits(self) -> int:
        """Number of bits of a code. The attribute exists only if the newest pass got codes, because mlx-lm's attention
        detects codes by this attribute."""
        if not self._gives_codes:
            raise AttributeError("bits")
        return self.form.bits

    @property
    def group_size(self) -> int:
        return self.form.group

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._gives_codes = keys.shape[2] == 1 and self.form.reads_codes
        return super().update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple[Any, Any]:
        rows = len(self.lengths.of)
        if self._gives_codes:
            seen = tuple(array[:rows, :, : self._seen] for array in self.arrays)
            return seen[:3], seen[3:]
        # All slots are dequantized, because dequantizing some of them would copy their codes first.
        codes = [array[:rows] for array in self.arrays]
        keys, values = self.form.dequantize(codes[:3]), self.form.dequantize(codes[3:])
        return keys[..., : self._seen, :], values[..., : self._seen, :]

    def extract(self, row: int) -> "QuantizedKV":
        alone = QuantizedKV(self.form, Lengths((self.lengths.of[row],)))
        alone.arrays = tuple(self._views(row))
        return alone

    @property
    def whole_bytes(self) -> int:
        """Size of the dequantized KV in bytes."""
        half = len(self.arrays) // 2
        pairs = [(self.arrays[at], self.arrays[at + 1]) for at in (0, half)] if self.arrays else []
        return sum(codes.size * (32 // self.form.bits) * scales.itemsize for codes, scales in pairs)

    def _entries(self, keys: mx.array, values: mx.array) -> tuple[mx.array, ...]:
        return (*self.form.quantize(keys), *self.form.quantize(values))


def set_kv_form(model: Any, form: KvForm | None) -> None:
    """Set the form of the KV of this model's rows."""
    model.kv_form = form


def kv_form_of(model: Any) -> KvForm | None:
    """Return the form of the KV of this model's rows; None if it is not quantized."""
    form: KvForm | None = getattr(model, "kv_form", None)
    return form


def make_caches(model: Any) -> list[Any]:
    """Return empty mlx-lm caches of one sequence, quantized if the model's KV is."""
    caches: list[Any] = make_prompt_cache(model)
    form = kv_form_of(model)
    return caches if form is None else quantized(caches, form)


def quantized(caches: Sequence[Any], form: KvForm) -> list[Any]:
    """Return these empty caches of one sequence in quantized form. A layer with two plain caches is not quantized,
    because the second one holds the keys of a sparse-attention indexer.
    """
    lengths = Lengths((0,))

    def replace(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            is_one = sum(type(child) is KVCache for child in cache.caches) == 1
            return CacheList(*map(replace, cache.caches)) if is_one else cache
        return QuantizedKV(form, lengths) if type(cache) is KVCache else cache

    return [replace(cache) for cache in caches]
