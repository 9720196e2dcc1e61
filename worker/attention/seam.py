"""Dispatch of a model's attention to the kernels.

mlx-lm's attention modules call its `scaled_dot_product_attention`, which a cache cannot override. These modules are
already wrapped for packed passes. If the code of a wrapped module refers to that function, the wrapper runs the same
code with an `AttentionSwitch` in place of that function. The switch calls a kernel where one applies, otherwise
mlx-lm's function. The library and its modules are not modified.
"""

from collections.abc import Callable, Generator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from worker.attention.kernel import (
    BITS,
    DIMS,
    GROUP,
    PARTIAL_SUMS_MAX_BYTES,
    TYPES,
    Attend,
    LayerKV,
    partial_sums_bytes,
    tokens_max,
)
from worker.kv.quantized import QuantizedKV
from worker.kv.ragged import RaggedKVCache
from worker.model.packing import Mixing

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
