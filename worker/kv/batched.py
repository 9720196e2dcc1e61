"""Batch caches of several sequences: merge, extend, filter, extract, and rewind after a block."""

import copy
from collections.abc import Collection, Sequence
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from worker.kv.quantized import QuantizedKV
from worker.kv.ragged import Lengths, RaggedKVCache, RaggedWindowCache
from worker.kv.spans_and_checkpoints import is_sliceable, leaves

# Types of one sequence's caches that have a batch form.
_SINGLE: Final = (KVCache, RotatingKVCache, ChunkedKVCache)
_REWOUND: Final = (RaggedKVCache, RaggedWindowCache)


def merge(rows: Sequence[Sequence[Any]]) -> list[Any]:
    """Return one batch cache per layer; row i of each has the KV or state of sequence i."""
    shared: dict[tuple[int, ...], Lengths] = {}

    def layer(column: Sequence[Any]) -> Any:
        first = column[0]
        if isinstance(first, CacheList):
            children = [cache.caches for cache in column]
            return CacheList(*(layer(same) for same in zip(*children, strict=True)))
        if is_sliceable(first):
            kind = QuantizedKV if isinstance(first, QuantizedKV) else RaggedKVCache
            lengths = tuple(cache.size() for cache in column)
            return kind.merge(column, shared.setdefault(lengths, Lengths(lengths)))
        return RaggedWindowCache.merge(column) if type(first) is RotatingKVCache else type(first).merge(column)

    return [layer(column) for column in zip(*rows, strict=True)]


def extend(caches: Sequence[Any], others: Sequence[Any]) -> None:
    """Append the rows of `others` to `caches`."""
    for cache, other in zip(caches, others, strict=True):
        cache.extend(other)


def keep(caches: Sequence[Any], rows: Sequence[int]) -> None:
    """Keep only these rows of the caches, in this order.

    All launched work is awaited first, because MLX writes to an array in place only if no running operation reads it.
    """
    flat, rows = leaves(caches), list(rows)
    moves = [leaf.moves(rows) if isinstance(leaf, RaggedKVCache) else None for leaf in flat]
    mx.eval(moves)
    mx.synchronize()
    for leaf, moved in zip(flat, moves, strict=True):
        if isinstance(leaf, RaggedKVCache):
            leaf.filter(rows, moved)
        else:
            leaf.filter(rows)


def without(count: int, leaving: Collection[int]) -> list[int]:
    """Return which of `count` rows stay, in the order that moves the fewest rows: the last rows take the places of rows
    that leave."""
    staying = count - len(leaving)
    last = [row for row in range(staying, count) if row not in leaving]
    return [last.pop() if row in leaving else row for row in range(staying)]


def take(caches: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    """Return new caches with copies of these rows."""

    def taken(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(taken, cache.caches))
        if isinstance(cache, RaggedKVCache):
            return cache.take(rows)
        own = copy.deepcopy(cache)
        own.filter(list(rows))
        return own

    return [taken(cache) for cache in caches]


def compact(caches: Sequence[Any]) -> None:
    """Free memory that was allocated for rows and tokens that have left."""
    for leaf in leaves(caches):
        if isinstance(leaf, RaggedKVCache):
            leaf.compact()


def extract(caches: Sequence[Any], row: int) -> list[Any]:
    """Return the caches of one row, whether it belongs to a batch or runs alone.

    The KV arrays are views, so a caller that stores a part of the KV copies only that part.
    """

    def take(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*(take(child) for child in cache.caches))
        return _cut(copy.deepcopy(cache)) if isinstance(cache, _SINGLE) else cache.extract(row)

    return [take(cache) for cache in caches]


def place(caches: Sequence[Any], skipped: Sequence[int]) -> None:
    """Place row i's next token `skipped[i]` positions after its slot, before a pass. All caches must be plain."""
    for leaf in leaves(caches):
        leaf.place(tuple(skipped))


def begin_block(caches: Sequence[Any], lengths: Sequence[int], width: int) -> None:
    """Prepare the caches for a forward pass of `width` tokens per row: row i has `lengths[i]` tokens, then padding."""
    if width == 1:
        return
    padding = [width - length for length in lengths]
    for leaf in leaves(caches):
        if isinstance(leaf, _REWOUND):
            leaf.begin(lengths, width)
        elif any(padding):
            leaf.prepare(lengths=list(lengths), right_padding=padding)


def end_block(caches: Sequence[Any], lengths: Sequence[int], width: int) -> None:
    """Remove the padding of a forward pass from all caches except those that `rewind` handles."""
    if min(lengths) < width:
        for leaf in leaves(caches):
            if not isinstance(leaf, _REWOUND):
                leaf.finalize()


def rewind(caches: Sequence[Any], drop: Sequence[int]) -> None:
    """Remove the newest `drop[i]` tokens of row i's last block from caches that keep tokens one by one."""
    if any(drop):
        for leaf in leaves(caches):
            if isinstance(leaf, _REWOUND):
                leaf.rewind(tuple(drop))


def is_recurrent(caches: Sequence[Any]) -> bool:
    """Whether some layers have a recurrent state."""
    return any(isinstance(leaf, ArraysCache) for leaf in leaves(caches))


def can_rewind(caches: Sequence[Any]) -> bool:
    """Whether rows in the batch form of these caches can be restored to their state before a block.

    Rows with both windows and recurrent layers cannot be restored, because the first token of a block cannot be removed
    from a window.
    """
    flat = leaves(caches)
    kinds = {type(leaf) for leaf in flat}
    has_sinks = any(type(leaf) is RotatingKVCache and leaf.keep for leaf in flat)
    rewound = {KVCache, QuantizedKV}
    return kinds <= {*rewound, RotatingKVCache, ArraysCache} and len(kinds - rewound) < 2 and not has_sinks


def states(caches: Sequence[Any]) -> list[list[Any]]:
    """Return the current arrays of recurrent layers. No copies are made, because MLX arrays are immutable."""
    return [list(leaf.cache) for leaf in leaves(caches) if isinstance(leaf, ArraysCache)]


def restore(caches: Sequence[Any], before: Sequence[list[Any]], rows: Sequence[bool]) -> None:
    """Restore the recurrent layers of each row that is set in `rows` to `before`, a result of `states`."""
    if not any(rows):
        return
    is_restored = mx.array(list(rows))
    recurrent = [leaf for leaf in leaves(caches) if isinstance(leaf, ArraysCache)]
    for leaf, held in zip(recurrent, before, strict=True):
        for at, (old, new) in enumerate(zip(held, leaf.cache, strict=True)):
            if new is not None:
                chosen = is_restored.reshape(-1, *[1] * (new.ndim - 1))
                leaf.cache[at] = mx.where(chosen, mx.zeros_like(new) if old is None else old, new)


def mark(caches: Sequence[Any]) -> list[Any]:
    """Return the current end of the caches of one row, for `go_back`.

    A mark has the number of tokens of a layer that keeps tokens one by one. Other layers are copied, because their
    arrays may be changed in place.
    """
    return [leaf.lengths if isinstance(leaf, RaggedKVCache) else _copy(leaf) for leaf in leaves(caches)]


def go_back(caches: Sequence[Any], marks: Sequence[Any]) -> None:
    """Remove the tokens that were added to the caches of one row since `mark`; a mark can be used again."""
    for leaf, held in zip(leaves(caches), marks, strict=True):
        if isinstance(leaf, RaggedKVCache):
            leaf.lengths = held
        elif isinstance(leaf, KVCache):
            leaf.trim(leaf.offset - held)
        else:
            vars(leaf).update(copy.deepcopy(held))


def _copy(leaf: Any) -> Any:
    return leaf.offset if isinstance(leaf, KVCache) else copy.deepcopy(vars(leaf))


def _cut(leaf: Any) -> Any:
    """Cut the unused slots off a cache of one sequence."""
    if leaf.keys is None:
        return leaf
    # A chunked cache only has the KV of its current chunk.
    held = leaf.offset - getattr(leaf, "start_position", 0)
    leaf.keys, leaf.values = leaf.keys[..., :held, :], leaf.values[..., :held, :]
    return leaf
