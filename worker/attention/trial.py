"""Trial of a kernel on this machine: rows of unequal lengths, compared with MLX's attention under a mask."""

from collections.abc import Sequence
from typing import Final, cast

import mlx.core as mx

from worker.attention.kernel import GROUP, Attend, Keep
from worker.attention.seam import AttentionForm

# Of rows whose last split has one slot, a few, or all: what is off at an edge shows.
LENGTHS: Final = (0, 5, 511, 512, 1300)
_ROOM: Final = 1536
_TOKENS: Final = (1, 3, 16)
_WINDOWS: Final = (0, 100)
# Largest deviation of a row as a part of its largest number. What a wrong kernel gives is off by about all of it.
_ROUNDED: Final = 3e-2
_EXACT: Final = 5e-3


class NotProved(Exception):
    """A kernel that is not used; the message says why."""


def prove(form: AttentionForm, attend: Attend) -> None:
    """Raise `NotProved` where a kernel computes something else than MLX, or a row by the rows beside it."""
    for tokens in _TOKENS:
        for window in _WINDOWS:
            queries, kept, sinks = _numbers(form, tokens)
            lengths = mx.array(LENGTHS, dtype=mx.int32)
            scale, end = form.dim**-0.5, LENGTHS[-1] + tokens
            output = attend(queries, kept, lengths, end, scale, window, sinks)
            _compare(output, _expected(form, queries, kept, scale, window, sinks))
            for row in (1, len(LENGTHS) - 1):
                own = Keep([each[row : row + 1] for each in kept.keys], [each[row : row + 1] for each in kept.values],
                           kept.bits)  # fmt: skip
                end = LENGTHS[row] + tokens
                alone = attend(queries[row : row + 1], own, lengths[row : row + 1], end, scale, window, sinks)
                if not mx.array_equal(alone, output[row : row + 1]).item():
                    raise NotProved("its kernel gives a row other numbers beside other rows")


def _numbers(form: AttentionForm, tokens: int) -> tuple[mx.array, Keep, mx.array | None]:
    """The same ones each time."""

    def numbers(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(form.dtype)

    rows = len(LENGTHS)
    queries = numbers(1, rows, form.heads, tokens, form.dim)
    kv = [numbers(seed, rows, form.kv_heads, _ROOM, form.dim) for seed in (2, 3)]
    held = [mx.quantize(each, group_size=GROUP, bits=form.bits) if form.bits else (each,) for each in kv]
    return queries, Keep(held[0], held[1], form.bits), numbers(4, form.heads) if form.has_sinks else None


def _expected(
    form: AttentionForm, queries: mx.array, kept: Keep, scale: float, window: int, sinks: mx.array | None
) -> mx.array:
    def whole(arrays: Sequence[mx.array]) -> mx.array:
        return mx.dequantize(*arrays, group_size=GROUP, bits=form.bits) if form.bits else arrays[0]

    own = mx.array(LENGTHS)[:, None, None, None] + mx.arange(queries.shape[2])[:, None]
    slots = mx.arange(_ROOM)
    mask = slots <= own
    mask = mask & (slots > own - window) if window else mask
    keys, values = whole(kept.keys), whole(kept.values)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _compare(output: mx.array, expected: mx.array) -> None:
    limit = _EXACT if expected.dtype == mx.float32 else _ROUNDED
    output, expected = (each.astype(mx.float32).flatten(1) for each in (output, expected))
    off = mx.max(mx.abs(output - expected), axis=1) / mx.max(mx.abs(expected), axis=1)
    deviation = cast(float, mx.max(off).item())
    # Also of what is not a number, which a maximum may pass over.
    if not (deviation <= limit and mx.all(mx.isfinite(output)).item()):
        raise NotProved(f"its kernel is off by {deviation:.2g} on this machine")
