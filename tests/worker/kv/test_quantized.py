"""Quantized KV of a row is its own bit for bit, whatever the batch does; attention reads what it stands for."""

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from worker.kv import batched, ragged
from worker.kv.quantized import KvForm, QuantizedKV, quantized
from worker.kv.ragged import Lengths

HEADS, DIM = 2, 64
FORMS = [KvForm(8, 64), KvForm(4, 32)]


def numbers(seed: int, rows: int, count: int, heads: int = HEADS) -> mx.array:
    return mx.random.normal((rows, heads, count, DIM), key=mx.random.key(seed))


class Rows:
    """A batch of two quantized layers, and each row's keys since its first token."""

    def __init__(self, form: KvForm) -> None:
        self._form = form
        self._seed = 0
        self.batch: list[Any] = []
        self.keys: list[mx.array] = []

    def join(self, *lengths: int) -> None:
        alone: list[list[Any]] = []
        for length in lengths:
            caches = quantized([KVCache(), KVCache()], self._form)
            keys = self._numbers(1, length)
            for cache in caches if length else ():
                cache.update_and_fetch(keys, -keys)
            alone.append(caches)
            self.keys.append(keys)
        merged = batched.merge(alone)
        if self.batch:
            batched.extend(self.batch, merged)
        else:
            self.batch = merged

    def block(self, counts: list[int], given_back: list[int]) -> None:
        width = ragged.wide(max(counts))
        keys = self._numbers(len(counts), width)
        batched.begin_block(self.batch, counts, width)
        for cache in self.batch:
            cache.update_and_fetch(keys, -keys)
        batched.end_block(self.batch, counts, width)
        drop = [width - count + back for count, back in zip(counts, given_back, strict=True)]
        batched.rewind(self.batch, drop)
        for at, less in enumerate(drop):
            self.keys[at] = mx.concatenate([self.keys[at], keys[at : at + 1, :, : width - less]], axis=2)

    def keep(self, *rows: int) -> None:
        batched.keep(self.batch, rows)
        self.keys = [self.keys[row] for row in rows]

    def check(self) -> None:
        for row, keys in enumerate(self.keys):
            expected = (*self._form.quantize(keys), *self._form.quantize(-keys))
            for cache in batched.extract(self.batch, row):
                assert cache.size() == keys.shape[2]
                for array, other in zip(cache.arrays, expected, strict=True):
                    assert mx.array_equal(array, other)

    def _numbers(self, rows: int, count: int) -> mx.array:
        self._seed += 1
        return numbers(self._seed, rows, count)


@pytest.mark.parametrize("sees_room", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_row_holds_the_codes_that_it_has_alone(
    form: KvForm, sees_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ragged, "sees_room", sees_room)
    rows = Rows(form)
    rows.join(5, 300, 0)
    rows.check()
    rows.block([4, 1, 2], [0, 0, 1])
    rows.block([1, 1, 1], [0, 0, 0])
    rows.check()
    rows.join(250)
    rows.block([7, 3, 1, 7], [3, 0, 0, 6])
    rows.check()
    rows.keep(3, 0)
    rows.block([1, 1], [0, 0])
    rows.block([9, 9], [8, 2])
    rows.check()
    rows.keep(1)
    rows.block([1], [0])
    rows.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [(300, 300), (300, 17)])
def test_attention_over_codes_is_that_over_the_numbers_that_they_stand_for(
    form: KvForm, lengths: tuple[int, int]
) -> None:
    outputs: list[mx.array] = []
    for reads_codes in (True, False):
        cache = QuantizedKV(KvForm(form.bits, form.group, reads_codes), Lengths((0, 0)))
        cache.update_and_fetch(numbers(1, 2, 300), numbers(2, 2, 300))
        cache.rewind((300 - lengths[0], 300 - lengths[1]))
        mask = cache.make_mask(1)
        keys, values = cache.update_and_fetch(numbers(3, 2, 1), numbers(4, 2, 1))
        assert isinstance(keys, mx.array) is not reads_codes
        queries = numbers(5, 2, 1, heads=4 * HEADS)
        outputs.append(scaled_dot_product_attention(queries, keys, values, cache, scale=DIM**-0.5, mask=mask))
    assert mx.allclose(*outputs, atol=1e-5)


def test_several_tokens_a_row_are_given_numbers_for_fused_attention() -> None:
    cache = QuantizedKV(FORMS[0], Lengths((0,)))
    keys, values = cache.update_and_fetch(numbers(1, 1, 9), numbers(2, 1, 9))
    assert keys.shape == values.shape == (1, HEADS, 9, DIM)
    assert not hasattr(cache, "bits")
    cache.update_and_fetch(numbers(3, 1, 1), numbers(4, 1, 1))
    assert (cache.bits, cache.group_size) == (8, 64)  # type: ignore[attr-defined]  # by these mlx-lm knows
    cache.update_and_fetch(numbers(5, 1, 2), numbers(6, 1, 2))
    assert not hasattr(cache, "bits")


@pytest.mark.parametrize(("form", "bits"), [(KvForm(8, 64), 8.5), (KvForm(4, 64), 4.5), (KvForm(4, 32), 5.0)])
def test_a_number_takes_its_bits_and_its_part_of_a_scale_and_a_bias(form: KvForm, bits: float) -> None:
    cache = QuantizedKV(form, Lengths((0,)))
    keys = numbers(1, 1, 256).astype(mx.bfloat16)
    cache.update_and_fetch(keys, keys)
    assert cache.nbytes * 8 == bits * 2 * keys.size
    assert cache.whole_bytes == 2 * keys.nbytes


def test_windows_states_and_the_index_of_a_layer_keep_their_form() -> None:
    caches = quantized(
        [KVCache(), RotatingKVCache(8), CacheList(ArraysCache(2), KVCache()), CacheList(KVCache(), KVCache())],
        FORMS[0],
    )
    assert [type(cache) for cache in caches] == [QuantizedKV, RotatingKVCache, CacheList, CacheList]
    assert [type(child) for child in caches[2].caches] == [ArraysCache, QuantizedKV]
    assert [type(child) for child in caches[3].caches] == [KVCache, KVCache]


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_attention_sees_no_row_that_has_left(form: KvForm, count: int) -> None:
    rows = Rows(form)
    rows.join(9, 12, 7, 10)
    batched.keep(rows.batch, batched.without(4, [1]))
    keys, values = rows.batch[0].update_and_fetch(numbers(1, 3, count), numbers(2, 3, count))
    for part in (keys, values):
        arrays = part if isinstance(part, tuple) else (part,)
        assert {array.shape[0] for array in arrays} == {3}
    assert rows.batch[0].arrays[0].shape[0] == 4
