"""Spans and checkpoints: mlx-lm caches of one sequence, taken apart for storage and assembled again.

A layer's cache is one of three kinds. *Sliceable*: plain or quantized KV, where the entry of a token does not depend on
later tokens, so any prefix is a slice. *Windowed*: the same for the newest tokens only, which suffices to continue at a
position if the whole window before that position is known. *Stateful*: everything else (recurrent state), valid only at
the exact position where it was copied. With windowed or stateful layers, a sequence can continue only at checkpoints.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache

from worker.kv.quantized import QuantizedKV
from worker.kv.ragged import Lengths

Span = list[tuple[mx.array, ...]]
"""Arrays `[1, heads, tokens, dim]` of each sliceable and windowed layer for the tokens of an edge: keys and values, or
the six arrays of quantized KV. Windowed layers have only the last tokens, at most a window."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Number of a model's layers of each kind; `make` returns empty caches of one sequence.

    `windows` lists the sizes of windows, each with the index (in a span) of one layer that has it.
    """

    make: Callable[[], list[Any]]
    sliceable: int
    windowed: int
    stateful: int
    windows: tuple[tuple[int, int], ...]
    # Whether layers of another rank of the group need checkpoints.
    is_checkpointed: bool = False

    @classmethod
    def of(cls, make: Callable[[], list[Any]]) -> "KvLayout":
        flat = leaves(make())
        kv = [leaf for leaf in flat if has_kv(leaf)]
        windows = {leaf.max_size: at for at, leaf in enumerate(kv) if is_windowed(leaf)}
        windowed = sum(is_windowed(leaf) for leaf in kv)
        return cls(make, len(kv) - windowed, windowed, len(flat) - len(kv), tuple(windows.items()))

    @property
    def needs_checkpoints(self) -> bool:
        return self.is_checkpointed or self.windowed + self.stateful > 0


def leaves(caches: Sequence[Any]) -> list[Any]:
    """Return the layers' caches in order, with `CacheList`s flattened."""
    flat: list[Any] = []
    for cache in caches:
        flat.extend(leaves(cache.caches) if isinstance(cache, CacheList) else [cache])
    return flat


def slice_span(caches: Sequence[Any], begin: int, end: int) -> Span:
    """Return copies of the KV of tokens [begin, end). A windowed layer has only tokens in its window. The copies are
    not evaluated yet."""
    return _pack([_slice(leaf, begin, end) for leaf in leaves(caches) if has_kv(leaf)])


def _slice(leaf: Any, begin: int, end: int) -> tuple[mx.array, ...]:
    if is_sliceable(leaf):
        arrays = leaf.arrays if isinstance(leaf, QuantizedKV) else (leaf.keys, leaf.values)
        return tuple(array[..., begin:end, :] for array in arrays)
    keys, values = (leaf._temporal_order(array) for array in (leaf.keys, leaf.values))
    first = leaf.offset - keys.shape[2]
    begin = min(max(begin, end - leaf.max_size, first), end) - first
    return keys[..., begin : end - first, :], values[..., begin : end - first, :]


def view_start(span: Span, end: int) -> Span:
    """Return the first tokens of a span without windows as views, which keep the memory of the whole span."""
    return [tuple(array[..., :end, :] for array in arrays) for arrays in span]


def part_span(span: Span, size: int, begin: int, end: int) -> Span:
    """Return copies of the KV of tokens [begin, end) from the span of an edge of `size` tokens."""
    return _pack([tuple(_part(array, size, begin, end) for array in arrays) for arrays in span])


def _part(array: mx.array, size: int, begin: int, end: int) -> mx.array:
    absent = size - array.shape[2]
    return array[..., max(0, begin - absent) : max(0, end - absent), :]


def cut_span(span: Span, size: int, at: int) -> tuple[Span, Span]:
    """Split the span of an edge of `size` tokens into copies of its two parts, so that each can be freed separately."""
    return part_span(span, size, 0, at), part_span(span, size, at, size)


def extend_windows(span: Span, caches: Sequence[Any], begin: int, end: int) -> Span:
    """Return the span of an edge that ends at `end`. Layers with windows have KV from `begin`, or from the start of
    their window if that is later.
    """
    held = [leaf for leaf in leaves(caches) if has_kv(leaf)]
    is_short = [is_windowed(leaf) and has[0].shape[2] < end - begin for leaf, has in zip(held, span, strict=True)]
    longer = iter(_pack([_slice(leaf, begin, end) for leaf, short in zip(held, is_short, strict=True) if short]))
    return [next(longer) if short else arrays for arrays, short in zip(span, is_short, strict=True)]


def _pack(span: Span) -> Span:
    """Copy a span, with one allocation for all arrays of the same shape and type, because allocating costs more than
    copying."""
    groups: dict[tuple[tuple[int, ...], mx.Dtype], list[mx.array]] = {}
    flat = [array for arrays in span for array in arrays]
    for array in flat:
        groups.setdefault((array.shape, array.dtype), []).append(array)
    # `concatenate` returns a group of one array unchanged, so `contiguous` is needed for a copy.
    packed = {kind: iter(mx.split(mx.contiguous(mx.concatenate(same)), len(same))) for kind, same in groups.items()}
    copies = iter([next(packed[array.shape, array.dtype]) for array in flat])
    return [tuple(islice(copies, len(arrays))) for arrays in span]


def copy_state(caches: Sequence[Any]) -> list[Any]:
    """Return copies of the stateful layers' caches."""
    return [_own(copy.deepcopy(leaf)) for leaf in leaves(caches) if not has_kv(leaf)]


def assemble(layout: KvLayout, spans: Sequence[Span], state: Sequence[Any], tokens: int) -> list[Any]:
    """Return caches of one sequence of `tokens` tokens, copied from consecutive spans and the checkpoint at their
    end."""
    columns, stateful, lengths = iter(list(zip(*spans, strict=True))), iter(state), Lengths((tokens,))

    def fill(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(fill(child) for child in cache.caches))
        if not has_kv(cache):
            return copy.deepcopy(next(stateful))
        parts = next(columns)
        if is_windowed(cache):
            return _assemble_window(parts, cache.max_size, tokens)
        arrays = tuple(mx.concatenate(list(same), axis=2) for same in zip(*parts, strict=True))
        if isinstance(cache, QuantizedKV):
            cache.arrays, cache.lengths = arrays, lengths
            return cache
        return KVCache.from_state((*arrays, tokens))

    return [fill(cache) for cache in layout.make()]


def _assemble_window(parts: Sequence[tuple[mx.array, ...]], window: int, tokens: int) -> Any:
    size, count, first = min(window, tokens), 0, len(parts)
    while count < size:
        first -= 1
        count += parts[first][0].shape[2]
    keys = mx.concatenate([keys for keys, _ in parts[first:]], axis=2)[..., count - size :, :]
    values = mx.concatenate([values for _, values in parts[first:]], axis=2)[..., count - size :, :]
    return RotatingKVCache.from_state((keys, values, tokens, 0, window, size))


def arrays_of(span: Span, state: Sequence[Any]) -> list[mx.array]:
    """Return all arrays of a span and a checkpoint."""
    arrays = [array for layer in span for array in layer]
    for leaf in state:
        flat: Any = tree_flatten(leaf.state)
        arrays.extend(array for _, array in flat if isinstance(array, mx.array))
    return arrays


def _own(leaf: Any) -> Any:
    """Replace a cache's state by a copy, because an extracted state can be a view of a whole batch."""

    def own(value: Any) -> Any:
        if isinstance(value, mx.array):
            return mx.contiguous(value)
        if isinstance(value, list | tuple):
            return type(value)(own(item) for item in value)
        return value

    leaf.state = own(leaf.state)
    return leaf


def is_sliceable(leaf: Any) -> bool:
    """Whether any prefix of this layer's KV is a slice of its cache."""
    return type(leaf) in (KVCache, QuantizedKV)


def is_windowed(leaf: Any) -> bool:
    """Whether this layer's cache holds the KV of the newest tokens only."""
    return type(leaf) is RotatingKVCache and leaf.keep == 0


def has_kv(leaf: Any) -> bool:
    """Whether this layer's KV is stored token by token, in spans."""
    return is_sliceable(leaf) or is_windowed(leaf)


def kind_of_leaf(leaf: Any) -> str:
    """Return the kind of a layer's cache, including the form of its KV. Stored KV can only be used in a cache of the
    same kind."""
    name = type(leaf).__name__
    return f"{name}({leaf.form.bits}, {leaf.form.group})" if isinstance(leaf, QuantizedKV) else name
