"""The attention kernels' tiling in numpy, and attention without any: the one is compared with the other on a CPU."""

from collections.abc import Sequence
from typing import Any, Final, cast

import mlx.core as mx
import numpy as np

from worker.attention.kernel import GROUP, LayerKV
from worker.attention.kernel_text import CHAINS, SPLIT, SUMMERS, TILE

Numbers = np.ndarray[Any, np.dtype[np.float32]]
_NONE: Final = np.float32(-1e30)


def tiled(
    queries: mx.array,
    kv: LayerKV,
    lengths: mx.array,
    end: int,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """What `attend` computes, sum by sum in its order."""
    asked, keys, values = _numbers(queries), *(_whole(each, kv.bits) for each in (kv.keys, kv.values))
    _, heads, tokens, dim = asked.shape
    kv_heads, room = keys.shape[1:3]
    group, splits = heads // kv_heads, -(-min(end, room) // SPLIT)
    output = np.zeros_like(asked)
    for row, length in enumerate(cast(list[int], lengths.tolist())[: len(asked)]):
        last = np.tile(length + np.arange(tokens), group)
        seen = int(last[0] + 1 - window if window else 0), min(length + tokens, room)
        for head in range(kv_heads):
            block = asked[row, head * group : (head + 1) * group].reshape(group * tokens, dim)
            own = slice(head * group, (head + 1) * group)
            sink = None if sinks is None else np.repeat(_numbers(sinks)[own], tokens) * np.float32(np.log2(np.e))
            parts = {
                split: _split(block, keys[row, head], values[row, head], split, seen, last, scale, window)
                for split in range(splits)
                if split * SPLIT < seen[1] and (split + 1) * SPLIT > seen[0]
            }
            output[row, own] = _sum(parts, last, window, dim, sink).reshape(group, tokens, dim)
    return mx.array(output).astype(queries.dtype)


Part = tuple[Numbers, Numbers, Numbers]
"""Of each query: a sum, the highest score, and the sum of the weights."""


def _split(
    block: Numbers,
    keys: Numbers,
    values: Numbers,
    split: int,
    seen: tuple[int, int],
    last: np.ndarray[Any, Any],
    scale: float,
    window: int,
) -> Part:
    first, end = seen
    chains: list[Part] = []
    for chain in range(CHAINS):
        out, most, sum_ = np.zeros_like(block), np.full(len(block), _NONE), np.zeros(len(block), np.float32)
        stop = min((split + 1) * SPLIT, end)
        for slot in range(split * SPLIT + chain * TILE, stop, CHAINS * TILE):
            if slot + TILE <= first:
                continue
            others = np.arange(slot, min(slot + TILE, end))
            scores = block @ keys[others].T * np.float32(scale * np.log2(np.e))
            is_seen = others <= last[:, None]
            if window:
                is_seen &= others > last[:, None] - window
            scores = np.where(is_seen, scores, 2 * _NONE)
            higher = np.maximum(most, scores.max(axis=1))
            weights, factor = np.exp2(scores - higher[:, None]), np.exp2(most - higher)
            out = out * factor[:, None] + weights @ values[others]
            most, sum_ = higher, sum_ * factor + weights.sum(axis=1)
        chains.append((out, most, sum_))
    return _added(chains)


def _sum(
    parts: dict[int, Part], last: np.ndarray[Any, Any], window: int, dim: int, sink: Numbers | None
) -> Numbers:  # fmt: skip
    none = np.zeros((len(last), dim), np.float32), np.full(len(last), _NONE), np.zeros(len(last), np.float32)
    chains: list[Part] = []
    for chain in range(SUMMERS):
        own = [part for split, part in parts.items() if split % SUMMERS == chain]
        chains.append(_added(own) if own else none)
    if sink is not None:
        chains.append((none[0], sink, np.ones_like(sink)))
    out, _, sum_ = _added(chains)
    return out / sum_[:, None]


def _added(parts: Sequence[Part]) -> Part:
    most = np.max([part[1] for part in parts], axis=0)
    out, sum_ = np.zeros_like(parts[0][0]), np.zeros_like(most)
    for part in parts:
        factor = np.exp2(part[1] - most)
        out, sum_ = out + part[0] * factor[:, None], sum_ + part[2] * factor
    return out, most, sum_


def plain(
    queries: mx.array,
    kv: LayerKV,
    lengths: mx.array,
    _end: int,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """The same by the definition of attention, in float64."""
    asked, keys, values = _numbers(queries), *(_whole(each, kv.bits) for each in (kv.keys, kv.values))
    group, output = asked.shape[1] // keys.shape[1], np.zeros(asked.shape)
    for row, length in enumerate(cast(list[int], lengths.tolist())):
        for head in range(asked.shape[1]):
            for token in range(asked.shape[2]):
                last = length + token
                seen = slice(max(0, last + 1 - window) if window else 0, last + 1)
                scores = keys[row, head // group, seen].astype(np.float64) @ asked[row, head, token] * scale
                if sinks is not None:
                    scores = np.append(scores, _numbers(sinks)[head])
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                output[row, head, token] = weights[: last + 1 - seen.start] @ values[row, head // group, seen]
    return mx.array(output.astype(np.float32))


def _whole(arrays: Sequence[mx.array], bits: int) -> Numbers:
    return _numbers(mx.dequantize(*arrays, group_size=GROUP, bits=bits) if bits else arrays[0])


def _numbers(array: mx.array) -> Numbers:
    return np.array(array.astype(mx.float32))
