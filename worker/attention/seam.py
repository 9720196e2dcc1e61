"""Way of a model's attention to the kernels.

mlx-lm's attention modules call its `scaled_dot_product_attention`, which offers no way for a cache to answer. Each of
these modules is wrapped for packed passes already: where a wrapped module's code names that function, the wrapper runs
the same code with ours under that name. Ours answers what a kernel can, from the cache, and leaves the rest to mlx-lm.
The library and its modules stay as they are.
"""

from collections.abc import Callable, Generator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from worker.attention.kernel import BITS, DIMS, GROUP, TOKENS_MAX, TYPES, Attend, Keep
from worker.kv.quantized import QuantizedKV
from worker.kv.ragged import RaggedKVCache
from worker.model.packing import Mixing

_NAME: Final = "scaled_dot_product_attention"


@dataclass(slots=True, frozen=True)
class AttentionForm:
    """What a kernel is compiled for: numbers of KV in `bits` bits, or as they are with 0."""

    heads: int
    kv_heads: int
    dim: int
    dtype: mx.Dtype
    bits: int
    has_sinks: bool


class AttentionSwitch:
    """Attention of one model: by a kernel for the forms that it has been proved for, by mlx-lm for all else.

    Owned by the engine thread.
    """

    def __init__(self, attend: Attend) -> None:
        self.attend = attend
        self.proved: Set[AttentionForm] = frozenset()
        # While somebody looks, the forms of passes that a kernel could have answered.
        self._met: set[AttentionForm] | None = None

    @contextmanager
    def look(self) -> Generator[Set[AttentionForm]]:
        """The forms that passes inside ask for, so far."""
        self._met = met = set[AttentionForm]()
        try:
            yield met
        finally:
            self._met = None

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
        """As mlx-lm's function."""
        tokens = queries.shape[2]
        if mask is None and not isinstance(cache, QuantizedKV):
            # One token of rows of equal length: MLX's own kernel takes these, and was 2 to 7 % quicker (H100, 8B).
            return scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)
        if (self.proved or self._met is not None) and tokens <= TOKENS_MAX and isinstance(cache, RaggedKVCache):
            before = cache.before(keys)
            window = before.window_of(mask, tokens) if before is not None else None
            if before is not None and window is not None and (form := _form(queries, cache, sinks)) is not None:
                if self._met is not None:
                    self._met.add(form)
                if form in self.proved:
                    kept = _kept(cache)
                    return self.attend(queries, kept, before.begins, before.end(tokens), scale, window, sinks)
        return scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)


def join(model: Any, switch: AttentionSwitch) -> bool:
    """Make a switch the attention of a model's modules; False where none can take it."""
    is_joined = False
    for module in model.modules():
        if isinstance(module, Mixing) and (call := _with(type(module.module).__call__, switch)) is not None:
            module.call = call
            is_joined = True
    return is_joined


def _with(call: Any, attention: Callable[..., mx.array]) -> Callable[..., Any] | None:
    """A module's code, with `attention` under the name of mlx-lm's; None where it does not name it."""
    if not isinstance(call, FunctionType) or call.__globals__.get(_NAME) is not scaled_dot_product_attention:
        return None
    if _NAME not in call.__code__.co_names:
        return None
    names = call.__globals__ | {_NAME: attention}
    own = FunctionType(call.__code__, names, call.__name__, call.__defaults__, call.__closure__)
    own.__kwdefaults__ = call.__kwdefaults__
    return own


def _kept(cache: RaggedKVCache) -> Keep:
    half = len(cache.arrays) // 2
    bits = cache.form.bits if isinstance(cache, QuantizedKV) else 0
    return Keep(cache.arrays[:half], cache.arrays[half:], bits)


def _form(queries: mx.array, cache: RaggedKVCache, sinks: mx.array | None) -> AttentionForm | None:
    """None where there is no kernel for these numbers and heads."""
    _, heads, _, dim = queries.shape
    kept, dtype = _kept(cache), queries.dtype
    keys, values = kept.keys[0], kept.values[0]
    kv_heads = keys.shape[1]
    if dim not in DIMS or dtype not in TYPES or keys.shape != values.shape or heads % kv_heads:
        return None
    if isinstance(cache, QuantizedKV):
        if kept.bits not in BITS or cache.form.group != GROUP or dim % GROUP or kept.keys[1].dtype != dtype:
            return None
    elif keys.shape[3] != dim or keys.dtype != dtype or values.dtype != dtype:
        return None
    return AttentionForm(heads, kv_heads, dim, dtype, kept.bits, sinks is not None)
