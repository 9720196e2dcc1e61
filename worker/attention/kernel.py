"""Attention of rows with lengths of their own, on KV that lies in their caches: the kernels and how they are called."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import mlx.core as mx

from worker.attention import cuda_text, metal_text
from worker.attention.kernel_text import (
    CHAINS,
    SPLIT,
    SPLIT_BODY,
    SPLIT_INPUTS,
    SPLIT_OUTPUTS,
    SUM_BODY,
    SUM_INPUTS,
    SUM_OUTPUTS,
    SUMMERS,
    header,
    written,
)

# New tokens of a row, at most.
TOKENS_MAX: Final = 16
DIMS: Final = (64, 80, 96, 128, 192, 256)
TYPES: Final = (mx.bfloat16, mx.float16, mx.float32)
# Of codes: their bits, and how many numbers share a scale.
BITS: Final = (8, 4)
GROUP: Final = 64


@dataclass(slots=True, frozen=True)
class Keep:
    """KV of a layer: `[rows, kv heads, room, dim]`, or codes, scales and biases of `bits` bits a number."""

    keys: Sequence[mx.array]
    values: Sequence[mx.array]
    bits: int = 0


Attend = Callable[..., mx.array]
"""Attention as `attend` computes it."""


@dataclass(slots=True, frozen=True)
class _Language:
    """A language's kernels, and the rows of a tile of queries."""

    split: Callable[..., Any]
    sum: Callable[..., Any]
    query_rows: int


def attend(
    queries: mx.array,
    kv: Keep,
    lengths: mx.array,
    end: int,
    scale: float,
    window: int = 0,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention `[rows, heads, tokens, dim]` of new tokens whose KV is in its slots: token i of row r sees slots up to
    `lengths[r] + i`, of a `window` the newest so many. `end` is at least the slots that are seen of the longest row."""
    language = _language()
    rows, heads, tokens, dim = queries.shape
    kv_heads, room = kv.keys[0].shape[1:3]
    splits = -(-min(end, room) // SPLIT)
    tiles = -(-(heads // kv_heads * tokens) // language.query_rows)
    numbers, queried = _numbers(scale * math.log2(math.e), window), heads // kv_heads * tokens
    template: list[tuple[str, Any]] = [("T", queries.dtype), ("D", dim)]
    sums, stats = language.split(
        inputs=[
            queries, kv.keys[0], kv.values[0],
            *(kv.keys[1:] if kv.bits else (queries, queries)), *(kv.values[1:] if kv.bits else (queries, queries)),
            lengths, numbers,
        ],
        template=[*template, ("BITS", kv.bits)],
        grid=(splits * tiles * CHAINS * 32, kv_heads, rows),
        threadgroup=(CHAINS * 32, 1, 1),
        output_shapes=[(rows, kv_heads, splits, queried, dim), (rows, kv_heads, splits, queried, 2)],
        output_dtypes=[mx.float32, mx.float32],
    )  # fmt: skip
    out: mx.array = language.sum(
        inputs=[sums, stats, queries, queries if sinks is None else sinks, lengths, numbers],
        template=[*template, ("HAS_SINKS", sinks is not None)],
        grid=(tokens * SUMMERS * 32, heads, rows),
        threadgroup=(SUMMERS * 32, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )[0]
    return out


@cache
def _language() -> _Language:
    """Of this machine's GPU. Raises `RuntimeError` where there is none."""
    if mx.default_device() != mx.gpu:
        raise RuntimeError("there is no GPU")
    is_cuda = mx.cuda.is_available()
    table, make = (cuda_text, mx.fast.cuda_kernel) if is_cuda else (metal_text, mx.fast.metal_kernel)

    def kernel(name: str, inputs: Sequence[str], outputs: Sequence[str], body: Any, opening: str) -> Callable[..., Any]:
        made: Any = make(name, inputs, outputs, written(body, table.WORDS), opening)
        return made

    return _Language(
        kernel("ragged_split", SPLIT_INPUTS, SPLIT_OUTPUTS, SPLIT_BODY, header(table.HEADER)),
        kernel("ragged_sum", SUM_INPUTS, SUM_OUTPUTS, SUM_BODY, ""),
        int(table.WORDS["query_rows"]),
    )


@cache
def _numbers(*numbers: float) -> mx.array:
    made = mx.array(numbers, dtype=mx.float32)
    mx.eval(made)
    return made
