"""Trial of a kernel on this machine: its results are compared with those of MLX's attention under a mask."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, cast

import mlx.core as mx

from worker.attention.kernel import GROUP, METAL_TOKENS_MAX, Attend, LayerKV, tokens_max
from worker.attention.seam import AttentionForm
from worker.kv.ragged import room

# Lengths of the trial's rows: within one split of slots, just below and at its end, and over several splits. There are
# more rows than `PADDED_ROWS`.
LENGTHS: Final = (0, 5, 511, 512, 1300, 1, 64, 100, 700)
# Lengths that one chain of the second kernel cannot add in one turn, as there are more splits than chains.
_LONG: Final = (4095, 4097, 5000)
_TOKENS: Final = (1, 3, METAL_TOKENS_MAX)
_WINDOWS: Final = (0, 100)
# Maximum deviation of a row, relative to the row's largest expected number, for types of 16 bits and for float32. Wrong
# kernels deviate by about 1.
_MAX_DEVIATION: Final = 3e-2
_MAX_FLOAT32_DEVIATION: Final = 5e-3


class NotProved(Exception):
    """Raised if a kernel must not be used; the message is the reason."""


def prove(form: AttentionForm, attend: Attend) -> None:
    """Raise `NotProved` if a kernel deviates from MLX, or a row's result depends on the other rows."""
    for tokens in sorted({*_TOKENS, tokens_max()}):
        for window in _WINDOWS:
            _try(form, attend, LENGTHS, tokens, window)
    _try(replace(form, heads=form.heads // form.kv_heads, kv_heads=1), attend, _LONG, 1, 0)


def _try(form: AttentionForm, attend: Attend, of: tuple[int, ...], tokens: int, window: int) -> None:
    queries, kv, sinks = _numbers(form, of, tokens)
    lengths = mx.array(of, dtype=mx.int32)
    scale = form.dim**-0.5
    output = attend(queries, kv, lengths, max(of) + tokens, scale, window, sinks)
    _compare(output, _expected(form, queries, kv, of, scale, window, sinks))
    for row in (1, len(of) - 1):
        one, end = slice(row, row + 1), of[row] + tokens
        own = LayerKV([each[one] for each in kv.keys], [each[one] for each in kv.values], kv.bits)
        alone = attend(queries[one], own, lengths[one], end, scale, window, sinks)
        if not mx.array_equal(alone, output[one]).item():
            raise NotProved("its kernel gives a row other numbers beside other rows")


def _numbers(form: AttentionForm, of: tuple[int, ...], tokens: int) -> tuple[mx.array, LayerKV, mx.array | None]:
    """Make random queries, KV and sinks for rows of these lengths; the same arguments give the same arrays."""

    def numbers(seed: int, *shape: int) -> mx.array:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(form.dtype)

    rows, slots = len(of), room(max(of) + tokens)
    queries = numbers(1, rows, form.heads, tokens, form.dim)
    plain = [numbers(seed, rows, form.kv_heads, slots, form.dim) for seed in (2, 3)]
    keys, values = (mx.quantize(each, group_size=GROUP, bits=form.bits) if form.bits else (each,) for each in plain)
    return queries, LayerKV(keys, values, form.bits), numbers(4, form.heads) if form.has_sinks else None


def _expected(
    form: AttentionForm,
    queries: mx.array,
    kv: LayerKV,
    of: tuple[int, ...],
    scale: float,
    window: int,
    sinks: mx.array | None,
) -> mx.array:
    def whole(arrays: Sequence[mx.array]) -> mx.array:
        return mx.dequantize(*arrays, group_size=GROUP, bits=form.bits) if form.bits else arrays[0]

    own = mx.array(of)[:, None, None, None] + mx.arange(queries.shape[2])[:, None]
    slots = mx.arange(kv.keys[0].shape[2])
    mask = slots <= own
    mask = mask & (slots > own - window) if window else mask
    keys, values = whole(kv.keys), whole(kv.values)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _compare(output: mx.array, expected: mx.array) -> None:
    limit = _MAX_FLOAT32_DEVIATION if expected.dtype == mx.float32 else _MAX_DEVIATION
    output, expected = (each.astype(mx.float32).flatten(1) for each in (output, expected))
    off = mx.max(mx.abs(output - expected), axis=1) / mx.max(mx.abs(expected), axis=1)
    deviation = cast(float, mx.max(off).item())
    # A maximum may ignore NaN.
    if not (deviation <= limit and mx.all(mx.isfinite(output)).item()):
        raise NotProved(f"its kernel is off by {deviation:.2g} on this machine")
