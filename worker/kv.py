"""mlx-lm caches of one sequence, taken apart for keeping and put together for use.

A layer's cache is one of two kinds. *Sliceable*: plain KV, where the entry of a token does not depend on what follows,
so any prefix is a slice. *Stateful*: everything else (sliding window, recurrent state), which is valid only at the
exact position where it was copied: a checkpoint.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import BatchKVCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

# What holds a sequence in the lane of one row; elsewhere these are merged into a batch's form of them.
_ALONE: Final = (KVCache, RotatingKVCache, ChunkedKVCache)

Span = list[tuple[mx.array, mx.array]]
"""Keys and values `[1, heads, tokens, dim]` of each sliceable layer over a span of tokens."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which kind each layer of a model is; `make` builds an empty cache of one sequence."""

    make: Callable[[], list[Any]]
    sliceable: int
    stateful: int

    @classmethod
    def of(cls, make: Callable[[], list[Any]]) -> "Layout":
        kinds = [is_sliceable(leaf) for leaf in leaves(make())]
        return cls(make, sum(kinds), len(kinds) - sum(kinds))

    @property
    def needs_checkpoints(self) -> bool:
        return self.stateful > 0


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The layers' caches with `CacheList`s opened, in order."""
    flat: list[Any] = []
    for cache in caches:
        flat.extend(leaves(cache.caches) if isinstance(cache, CacheList) else [cache])
    return flat


def extract(caches: Sequence[Any], row: int) -> list[Any]:
    """One row of a batch's caches, or the caches of the one row of a lane of one, as they are now.

    Plain KV comes as views: whoever keeps a part copies that part, not all of it.
    """
    # Together: one wait for the device, not one for each layer.
    mx.eval([leaf.left_padding for leaf in leaves(caches) if type(leaf) is BatchKVCache])

    def take(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(take(child) for child in cache.caches))
        if isinstance(cache, _ALONE):
            return _cut(copy.deepcopy(cache))
        if type(cache) is not BatchKVCache:
            return cache.extract(row)
        padding: Any = cache.left_padding.tolist()
        keys, values = (array[row : row + 1, :, padding[row] :] for array in cache.keys_and_values())
        return KVCache.from_state((keys, values, int(keys.shape[2])))

    return [take(cache) for cache in caches]


def _cut(leaf: Any) -> Any:
    """Without the room that KV has to grow."""
    if leaf.keys is None:
        return leaf
    # A chunk's KV begins where it does.
    held = leaf.offset - getattr(leaf, "start_position", 0)
    leaf.keys, leaf.values = leaf.keys[..., :held, :], leaf.values[..., :held, :]
    return leaf


def slice_span(caches: Sequence[Any], begin: int, end: int) -> Span:
    """Own copies of the sliceable layers' entries for tokens [begin, end); evaluated later, in order."""
    return _pack(
        [
            (leaf.keys[..., begin:end, :], leaf.values[..., begin:end, :])
            for leaf in leaves(caches)
            if is_sliceable(leaf)
        ]
    )


def view_span(span: Span, begin: int, end: int) -> Span:
    """A part of a span, to be read at once: it keeps the memory of the whole."""
    return [(keys[..., begin:end, :], values[..., begin:end, :]) for keys, values in span]


def cut_span(span: Span, at: int) -> tuple[Span, Span]:
    """Two spans with memory of their own, so that each can be freed alone."""
    return (
        _pack([(keys[..., :at, :], values[..., :at, :]) for keys, values in span]),
        _pack([(keys[..., at:, :], values[..., at:, :]) for keys, values in span]),
    )


def _pack(span: Span) -> Span:
    """A copy in memory of its own, in one piece for all arrays of a shape: an allocation costs more than a copy."""
    groups: dict[tuple[tuple[int, ...], mx.Dtype], list[mx.array]] = {}
    flat = [array for pair in span for array in pair]
    for array in flat:
        groups.setdefault((array.shape, array.dtype), []).append(array)
    # `contiguous` is what copies a group of one.
    packed = {kind: iter(mx.split(mx.contiguous(mx.concatenate(same)), len(same))) for kind, same in groups.items()}
    copies = iter([next(packed[array.shape, array.dtype]) for array in flat])
    return list(zip(copies, copies, strict=True))


def copy_state(caches: Sequence[Any]) -> list[Any]:
    """The stateful layers' caches as they are now, with memory of their own."""
    return [_own(copy.deepcopy(leaf)) for leaf in leaves(caches) if not is_sliceable(leaf)]


def assemble(layout: Layout, spans: Sequence[Span], state: Sequence[Any]) -> list[Any]:
    """A cache of one sequence from consecutive spans and the checkpoint at their end. Shares nothing with either."""
    columns = list(zip(*spans, strict=True))
    sliceable, stateful = iter(columns), iter(state)

    def fill(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(fill(child) for child in cache.caches))
        if not is_sliceable(cache):
            return copy.deepcopy(next(stateful))
        parts = next(sliceable)
        cache.keys = mx.concatenate([keys for keys, _ in parts], axis=2)
        cache.values = mx.concatenate([values for _, values in parts], axis=2)
        cache.offset = int(cache.keys.shape[2])
        return cache

    return [fill(cache) for cache in layout.make()]


def arrays_of(span: Span, state: Sequence[Any]) -> list[mx.array]:
    """Every array of a span and a checkpoint."""
    arrays = [array for pair in span for array in pair]
    for leaf in state:
        flat: Any = tree_flatten(leaf.state)
        arrays.extend(array for _, array in flat if isinstance(array, mx.array))
    return arrays


def _own(leaf: Any) -> Any:
    """Extracted states may be views of a whole batch: give them memory of their own."""

    def own(value: Any) -> Any:
        if isinstance(value, mx.array):
            return mx.contiguous(value)
        if isinstance(value, list | tuple):
            return type(value)(own(item) for item in value)
        return value

    leaf.state = own(leaf.state)
    return leaf


def is_sliceable(leaf: Any) -> bool:
    """Whether any prefix of this layer's cache is a slice of it."""
    return type(leaf) is KVCache
