"""Small real caches whose every value says which token it is for, at which position, in which layer."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from worker.kv.quantized import KvForm, QuantizedKV, quantized
from worker.kv.spans_and_checkpoints import KvLayout

WINDOW = 8
HEADS, DIM = 2, 3
# As wide as a group of quantized KV.
GROUP = 32

KINDS: dict[str, Callable[[], list[Any]]] = {
    "plain": lambda: [KVCache(), KVCache()],
    "sliding": lambda: [RotatingKVCache(WINDOW), KVCache()],
    "recurrent": lambda: [ArraysCache(2), KVCache(), ArraysCache(2)],
    "lists": lambda: [CacheList(ArraysCache(2), KVCache()), CacheList(KVCache(), KVCache())],
    "only sliding": lambda: [RotatingKVCache(WINDOW), RotatingKVCache(WINDOW)],
    "two windows": lambda: [RotatingKVCache(WINDOW), KVCache(), RotatingKVCache(WINDOW // 2), ArraysCache(2)],
    "quantized": lambda: quantized([KVCache(), KVCache()], KvForm(8, GROUP)),
    "only recurrent": lambda: [ArraysCache(2), ArraysCache(2)],
}


def layout(kind: str) -> KvLayout:
    return KvLayout.of(KINDS[kind])


def grow(caches: Sequence[Any], prefix: Sequence[int], tokens: Sequence[int]) -> None:
    """Grow `caches`, which have seen `prefix`, as a model that runs `tokens` would."""
    for layer, cache in enumerate(caches):
        _grow(cache, layer, prefix, tokens)


def filled(kind: str, tokens: Sequence[int]) -> list[Any]:
    """A cache that has seen `tokens`."""
    caches = KINDS[kind]()
    grow(caches, (), tokens)
    return caches


def contents(caches: Sequence[Any]) -> list[Any]:
    """Everything that a model could read of `caches`, comparable."""
    return [_contents(cache) for cache in caches]


def _grow(cache: Any, layer: int, prefix: Sequence[int], tokens: Sequence[int]) -> None:
    if isinstance(cache, CacheList):
        for at, child in enumerate(cache.caches):
            _grow(child, layer * 10 + at, prefix, tokens)
    elif isinstance(cache, ArraysCache):
        # Depends on every token so far and their order, as a recurrent state does.
        state = 0.0
        for position, token in enumerate([*prefix, *tokens]):
            state = (state * 31 + token * 7 + position) % 65521
        cache[0] = mx.full((1, 4), state + layer)
        cache[1] = mx.full((1, 2, 2), state * 2 + layer)
    else:
        begin = len(prefix)
        values = np.array([token * 1000.0 + begin + at for at, token in enumerate(tokens)], dtype=np.float32) + layer
        width = GROUP if isinstance(cache, QuantizedKV) else DIM
        keys = np.broadcast_to(values[None, None, :, None], (1, HEADS, len(tokens), width))
        cache.update_and_fetch(mx.array(keys), mx.array(-keys))


def _contents(cache: Any) -> Any:
    if isinstance(cache, CacheList):
        return [_contents(child) for child in cache.caches]
    if isinstance(cache, ArraysCache):
        return [None if array is None else array.tolist() for array in cache.cache]
    if isinstance(cache, QuantizedKV):
        length = cache.size()
        return length, *(array[..., :length, :].tolist() for array in cache.arrays)
    if cache.keys is None:
        return 0, [], []
    if isinstance(cache, RotatingKVCache):
        shown = min(cache.offset, cache.max_size)
        ordered = (cache._temporal_order(array)[..., -shown:, :].tolist() for array in (cache.keys, cache.values))
        return cache.offset, *ordered
    return cache.offset, *(array.tolist() for array in cache.keys_and_values())
