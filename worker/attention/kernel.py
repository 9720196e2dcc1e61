"""Attention kernels for rows of unequal lengths, which read KV directly from the rows' caches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import mlx.core as mx

from worker.attention import cuda_text, metal_text
from worker.attention.kernel_text import (
    CHAINS,
    COMMON,
    SPLIT,
    SPLIT_BODY,
    SPLIT_INPUTS,
    SPLIT_OUTPUTS,
    SUM_BODY,
    SUM_INPUTS,
    SUM_OUTPUTS,
    SUMMERS,
    source,
)
from worker.kv.ragged import PADDED_ROWS

# Maximum number of new tokens per row for which these kernels are used. On Metal, MLX's attention of more tokens
# compiles nothing for a new length. The limit is higher on CUDA, where cuDNN's plan for a new length takes 45 to 70 ms
# and MLX's attention without cuDNN was slower than these kernels (H100).
METAL_TOKENS_MAX: Final = 16
CUDA_TOKENS_MAX: Final = 512
# Maximum size of the partial sums of a pass. They grow with the pass's number of tokens times the number of slots.
PARTIAL_SUMS_MAX_BYTES: Final = 1 << 28
# Supported sizes of heads, and supported dtypes.
DIMS: Final = (64, 80, 96, 128, 192, 256)
TYPES: Final = (mx.bfloat16, mx.float16, mx.float32)
# Supported bits per quantized number, and the number of values that share a scale and a bias.
BITS: Final = (8, 4)
GROUP: Final = 64


@dataclass(slots=True, frozen=True)
class LayerKV:
    """KV of a layer. If `bits` is 0, `keys` and `values` are one array `[rows, kv heads, slots, dim]` each; otherwise
    they are codes of `bits` bits per number, scales and biases."""

    keys: Sequence[mx.array]
    values: Sequence[mx.array]
    bits: int = 0


Attend = Callable[..., mx.array]
"""Function with the parameters and result of `attend`."""


@dataclass(slots=True, frozen=True)
class _Kernels:
    """Compiled kernels of this machine's GPU, and the number of queries in one tile."""

    split: Callable[..., Any]
    sum: Callable[..., Any]
    query_rows: int


def tokens_max() -> int:
    """Return the maximum number of new tokens per row on this machine."""
    return CUDA_TOKENS_MAX if mx.cuda.is_available() else METAL_TOKENS_MAX


def partial_sums_bytes(queries: mx.array, end: int) -> int:
    """Return the size of the float32 sums of `attend` before they are added over the splits."""
    rows, heads, tokens, dim = queries.shape
    return 4 * rows * heads * tokens * (dim + 2) * -(-end // SPLIT)


def attend(
    queries: mx.array,
    kv: LayerKV,
    lengths: mx.array,
    end: int,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute attention `[rows, heads, tokens, dim]` of new tokens whose KV is already in its slots.

    Token i of row r attends to slots up to `lengths[r] + i`; with a `window`, only to the newest `window` of these
    slots. `end` is at least the number of slots of the longest row. `lengths` may have further elements, which are not
    read. Raises `RuntimeError` without a GPU.
    """
    kernels = _kernels()
    rows, heads, tokens, dim = queries.shape
    lengths = lengths if lengths.size >= PADDED_ROWS else mx.pad(lengths, (0, PADDED_ROWS - lengths.size))
    # CUDA's compiled kernels do not differ by the types of their inputs.
    sinks = None if sinks is None else sinks.astype(queries.dtype)
    kv_heads, room = kv.keys[0].shape[1:3]
    splits, queries_per_head = -(-min(end, room) // SPLIT), heads // kv_heads * tokens
    tiles = -(-queries_per_head // kernels.query_rows)
    numbers = _numbers(scale * math.log2(math.e), window)
    template: list[tuple[str, Any]] = [("T", queries.dtype), ("D", dim)]
    sums, stats = kernels.split(
        inputs=[
            queries, kv.keys[0], kv.values[0],
            *(kv.keys[1:] if kv.bits else (queries, queries)), *(kv.values[1:] if kv.bits else (queries, queries)),
            lengths, numbers,
        ],
        template=[*template, ("BITS", kv.bits)],
        grid=(splits * tiles * CHAINS * 32, kv_heads, rows),
        threadgroup=(CHAINS * 32, 1, 1),
        output_shapes=[(rows, kv_heads, splits, queries_per_head, dim), (rows, kv_heads, splits, queries_per_head, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )  # fmt: skip
    out: mx.array = kernels.sum(
        inputs=[sums, stats, queries, queries if sinks is None else sinks, lengths, numbers],
        template=[*template, ("HAS_SINKS", sinks is not None)],
        grid=(tokens * SUMMERS * 32, heads, rows),
        threadgroup=(SUMMERS * 32, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]
    return out


@cache
def _kernels() -> _Kernels:
    """Compile the kernels for this machine's GPU. Raises `RuntimeError` without one."""
    if mx.default_device() != mx.gpu:
        raise RuntimeError("there is no GPU")
    is_cuda = mx.cuda.is_available()
    table, make = (cuda_text, mx.fast.cuda_kernel) if is_cuda else (metal_text, mx.fast.metal_kernel)

    def kernel(name: str, inputs: Sequence[str], outputs: Sequence[str], body: Any, opening: str) -> Callable[..., Any]:
        compiled: Any = make(name, inputs, outputs, source(body, table.WORDS), opening)
        return compiled

    return _Kernels(
        kernel("ragged_split", SPLIT_INPUTS, SPLIT_OUTPUTS, SPLIT_BODY, COMMON + table.HEADER),
        kernel("ragged_sum", SUM_INPUTS, SUM_OUTPUTS, SUM_BODY, ""),
        int(table.WORDS["query_rows"]),
    )


@cache
def _numbers(*numbers: float) -> mx.array:
    array = mx.array(numbers, dtype=mx.float32)
    mx.eval(array)
    return array
