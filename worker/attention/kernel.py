"""Attention kernels for rows of unequal lengths, which read KV directly from the rows' caches.

Dispatch of a model's attention to the kernels.

mlx-lm's attention modules call its `scaled_dot_product_attention`, which a cache cannot override. These modules are
already wrapped for packed passes. If the code of a wrapped module refers to that function, the wrapper runs the same
code with an `AttentionSwitch` in place of that function. The switch calls a kernel where one applies, otherwise
mlx-lm's function. The library and its modules are not modified.

Trial of a kernel on this machine: its results are compared with those of MLX's attention under a mask.
"""

import math
from collections.abc import Callable, Generator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

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
from worker.kv.quantized import QuantizedKV
from worker.kv.ragged import PADDED_ROWS, RaggedKVCache, room
from worker.model.packing import Mixing

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


_FUNCTION: Final = "scaled_dot_product_attention"


@dataclass(slots=True, frozen=True)
class AttentionForm:
    """Shapes and types for which a kernel is compiled. KV has `bits` bits per number; 0 if it is not quantized."""

    heads: int
    kv_heads: int
    dim: int
    dtype: mx.Dtype
    bits: int
    has_sinks: bool


class AttentionSwitch:
    """Attention of one model: a kernel for the forms with a successful trial, otherwise mlx-lm's function.

    Owned by the engine thread.
    """

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self._tokens_max = tokens_max()
        # Maximum size of the partial sums of a call; a larger call has mlx-lm's function.
        self.sums_max_bytes = PARTIAL_SUMS_MAX_BYTES
        self.proved: Set[AttentionForm] = frozenset()
        # Forms of the recorded passes that a kernel could compute; None while nothing is recorded.
        self._recorded: set[AttentionForm] | None = None

    @contextmanager
    def record_forms(self) -> Generator[Set[AttentionForm]]:
        """Record the forms of the passes inside this context that a kernel could compute."""
        self._recorded = met = set[AttentionForm]()
        try:
            yield met
        finally:
            self._recorded = None

    def __call__(
        self,
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Compute attention, with the parameters and result of mlx-lm's `scaled_dot_product_attention`."""
        tokens = queries.shape[2]
        if mask is None and not isinstance(cache, QuantizedKV):
            # MLX's own kernel was 2 to 7 % faster for one token of rows of equal length (H100, 8B).
            return scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        if (
            (self.proved or self._recorded is not None)
            and tokens <= self._tokens_max
            and isinstance(cache, RaggedKVCache)
        ):
            before = cache.before(keys)
            window = before.window_of(mask, tokens) if before is not None else None
            if before is not None and window is not None and (form := _form(queries, cache, sinks)) is not None:
                if self._recorded is not None:
                    self._recorded.add(form)
                end = before.end(tokens)
                if form in self.proved and partial_sums_bytes(queries, end) <= self.sums_max_bytes:
                    return self.attend(queries, _layer_kv(cache), before.padded_begins, end, scale, window, sinks)
        return scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def bound_sums(model: Any, free_bytes: int) -> None:
    """Bound the partial sums of a model's kernels by the memory that a step may take for its temporary arrays."""
    switch: AttentionSwitch | None = getattr(model, "attention_switch", None)
    if switch is not None:
        switch.sums_max_bytes = min(PARTIAL_SUMS_MAX_BYTES, free_bytes)


def join(model: Any, switch: AttentionSwitch) -> bool:
    """Let the attention modules of a model call a switch. Returns whether any module calls it."""
    model.attention_switch = switch
    is_joined = False
    for module in model.modules():
        if isinstance(module, Mixing) and (call := _with_attention(type(module.module).__call__, switch)) is not None:
            module.call = call
            is_joined = True
    return is_joined


def _with_attention(call: Any, attention: Callable[..., mx.array]) -> Callable[..., Any] | None:
    """Return a module's code with `attention` in place of mlx-lm's function; None if the code does not use that
    function."""
    if not isinstance(call, FunctionType) or call.__globals__.get(_FUNCTION) is not scaled_dot_product_attention:
        return None
    if _FUNCTION not in call.__code__.co_names:
        return None
    names = call.__globals__ | {_FUNCTION: attention}
    own = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    return own


def _layer_kv(cache: RaggedKVCache) -> LayerKV:
    half = len(cache.arrays) // 2
    bits = cache.form.bits if isinstance(cache, QuantizedKV) else 0
    return LayerKV(cache.arrays[:half], cache.arrays[half:], bits)


def _form(queries: mx.array, cache: RaggedKVCache, sinks: mx.array | None) -> AttentionForm | None:
    """Return the form of an attention call; None if no kernel supports the call."""
    _, heads, _, dim = queries.shape
    kv, dtype = _layer_kv(cache), queries.dtype
    keys, values = kv.keys[0], kv.values[0]
    kv_heads = keys.shape[1]
    if dim not in DIMS or dtype not in TYPES or keys.shape != values.shape or heads % kv_heads:
        return None
    if isinstance(cache, QuantizedKV):
        if kv.bits not in BITS or cache.form.group != GROUP or dim % GROUP or kv.keys[1].dtype != dtype:
            return None
    elif keys.shape[3] != dim or keys.dtype != dtype or values.dtype != dtype:
        return None
    return AttentionForm(heads, kv_heads, dim, dtype, kv.bits, sinks is not None)


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
    queries, kv, sinks = _trial_numbers(form, of, tokens)
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


def _trial_numbers(form: AttentionForm, of: tuple[int, ...], tokens: int) -> tuple[mx.array, LayerKV, mx.array | None]:
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
