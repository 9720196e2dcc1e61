"""Check of quantized KV at load: whether the model supports it, and whether attention over its codes is right.

Kernels that multiply with codes have been wrong for some sizes of heads, and some devices lack them. So attention over
codes is compared with attention over dequantized numbers, for the model's heads and for the model itself. If they
differ, or codes cannot be used, a layer's KV is dequantized for each pass.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from protocol.failures import Code
from protocol.quantized_kv import ALL_WHOLE, group_of_all, obstacle
from worker.engine.load_checks.self_check import CheckFailed, reason_of, refusal
from worker.errors import LoadFailed, foreign_code
from worker.kv.kv import leaves
from worker.kv.quantized import KvForm, QuantizedKV, kv_form_of, quantized, set_kv_form
from worker.kv.ragged import Lengths

log = logging.getLogger("mlxd.worker")

# The long row must have more than the 1,024 tokens from which MLX uses other kernels, and must not be a multiple of the
# step in which KV grows.
LONG_ROW_TOKENS: Final = 1088
SHORT_ROW_TOKENS: Final = 300
# Maximum deviation in float32, relative to the largest output. A wrong kernel deviates by about 1.
EXACT_LIMIT: Final = 1e-3
# Maximum deviation of attention whose scores are in 16 bits, relative to the largest output.
ATTENTION_LIMIT: Final = 3e-2
# Maximum deviation of a whole model's output in 16 bits, relative to the largest output.
MODEL_LIMIT: Final = 0.1
# A warning is logged if quantization moves more than this part of the next token's probability to other tokens.
SHIFT_WARNING: Final = 0.2


@dataclass(frozen=True, slots=True)
class Heads:
    """Geometry of a layer's attention."""

    queries: int
    kv: int
    key_width: int
    value_width: int
    dtype: mx.Dtype


def quantize_kv(model: Any, config: dict[str, Any], bits: int, ids: Sequence[int], *, in_group: bool) -> None:
    """Quantize the KV of the model's rows to `bits` bits from now on. Raises `LoadFailed`."""
    if in_group:
        raise _refused(bits, "several processes run it together")
    set_kv_form(model, choose_form(model, config, bits, ids))


@contextmanager
def without_codes(model: Any) -> Generator[bool]:
    """Make passes dequantize KV instead of reading its codes. Yields False if this changes nothing, because passes
    dequantize KV anyway.
    """
    form = kv_form_of(model)
    if form is None or not form.reads_codes:
        yield False
        return
    set_kv_form(model, KvForm(form.bits, form.group, reads_codes=False))
    try:
        yield True
    finally:
        set_kv_form(model, form)


def choose_form(model: Any, config: dict[str, Any], bits: int, ids: Sequence[int]) -> KvForm:
    """Return the form of quantized KV with `bits` bits for this model; `ids` are tokens of text. Raises
    `LoadFailed`."""
    if why := obstacle(config, bits):
        raise _refused(bits, why)
    heads = _heads(model, config, ids)
    if not heads:
        raise _refused(bits, ALL_WHOLE)
    try:
        group = group_of_all({width for each in heads for width in (each.key_width, each.value_width)})
    except ValueError as error:
        raise _refused(bits, str(error)) from None
    whole = KvForm(bits, group, reads_codes=False)
    with foreign_code(lambda error: _refused(bits, f"its attention fails: {reason_of(error)}")):
        expected = _trial(model, whole, ids)
    try:
        form = KvForm(bits, group)
        _compare("the model's output", _trial(model, form, ids), expected, MODEL_LIMIT)
        for each in heads:
            for lengths in ((LONG_ROW_TOKENS, LONG_ROW_TOKENS), (LONG_ROW_TOKENS, SHORT_ROW_TOKENS)):
                _compare(
                    "attention", _attention(form, each, lengths), _attention(whole, each, lengths), ATTENTION_LIMIT
                )
    except Exception as error:  # code of any architecture may raise any error
        log.warning("KV in %d bits is dequantized for each step: %s", bits, reason_of(error))
        form = whole
    _log_shift(bits, form, expected, _logits(model, make_prompt_cache(model), ids))
    return form


def _log_shift(bits: int, form: KvForm, quantized_logits: mx.array, logits: mx.array) -> None:
    """Log the effect of quantization on a few words: a first impression, not a measure of quality."""
    left, right = (mx.softmax(each[0, -1].astype(mx.float32)) for each in (quantized_logits, logits))
    shifted = cast(float, mx.sum(mx.abs(left - right)).item()) / 2
    message = "KV is kept in %d bits, in groups of %d: on a sample, %.2g of the next token's probability is shifted"
    log.log(logging.WARNING if shifted > SHIFT_WARNING else logging.INFO, message, bits, form.group, shifted)


def _refused(bits: int, why: str) -> LoadFailed:
    return LoadFailed(Code.BAD_CONFIG, f"kv_bits = {bits}, but this model cannot have its KV quantized: {why}")


def _heads(model: Any, config: dict[str, Any], ids: Sequence[int]) -> set[Heads]:
    """Run a pass and return the head geometries of the layers whose KV would be quantized."""
    caches = make_prompt_cache(model)
    with foreign_code(refusal):
        mx.eval(model(mx.array([ids[:1]]), cache=caches))
    replaced = [isinstance(leaf, QuantizedKV) for leaf in leaves(quantized(make_prompt_cache(model), KvForm(8, 64)))]
    text = config | cast(dict[str, Any], config.get("text_config") or {})
    queries = next((text[key] for key in ("num_attention_heads", "n_head", "n_heads") if key in text), 0)
    heads: set[Heads] = set()
    for leaf, is_replaced in zip(leaves(caches), replaced, strict=True):
        if is_replaced and leaf.keys is not None:
            kv, width = leaf.keys.shape[1], leaf.keys.shape[3]
            count = queries if isinstance(queries, int) and queries % kv == 0 else kv
            heads.add(Heads(max(count, kv), kv, width, leaf.values.shape[3], leaf.keys.dtype))
    return heads


def _trial(model: Any, form: KvForm, ids: Sequence[int]) -> mx.array:
    """Return the logits after a prompt with quantized KV."""
    return _logits(model, quantized(make_prompt_cache(model), form), ids)


def _logits(model: Any, caches: Sequence[Any], ids: Sequence[int]) -> mx.array:
    model(mx.array([ids[:-1]]), cache=caches)
    logits: mx.array = model(mx.array([ids[-1:]]), cache=caches)
    mx.eval(logits)
    return logits


def _attention(form: KvForm, heads: Heads, lengths: tuple[int, int]) -> mx.array:
    """Return the attention of one more token in each of two rows of these lengths, with fixed pseudo-random numbers."""

    def numbers(seed: int, count: int, of: int, width: int) -> mx.array:
        return mx.random.normal((2, of, count, width), key=mx.random.key(seed)).astype(heads.dtype)

    cache = QuantizedKV(form, Lengths((0, 0)))
    cache.update_and_fetch(
        numbers(1, LONG_ROW_TOKENS, heads.kv, heads.key_width), numbers(2, LONG_ROW_TOKENS, heads.kv, heads.value_width)
    )
    cache.rewind((LONG_ROW_TOKENS - lengths[0], LONG_ROW_TOKENS - lengths[1]))
    mask = cache.make_mask(1)
    new = numbers(3, 1, heads.kv, heads.key_width), numbers(4, 1, heads.kv, heads.value_width)
    keys, values = cache.update_and_fetch(*new)
    queries, scale = numbers(5, 1, heads.queries, heads.key_width), heads.key_width**-0.5
    output: mx.array = scaled_dot_product_attention(queries, keys, values, cache, scale=scale, mask=cast(Any, mask))
    mx.eval(output)
    return output


def _compare(name: str, output: mx.array, expected: mx.array, rounded: float) -> None:
    """Raise `CheckFailed` if the outputs differ by more than rounding explains; `rounded` is the limit in 16 bits."""
    limit = EXACT_LIMIT if expected.dtype == mx.float32 else rounded
    output, expected = output.astype(mx.float32), expected.astype(mx.float32)
    largest = cast(float, mx.max(mx.abs(expected)).item())
    deviation = cast(float, mx.max(mx.abs(output - expected)).item()) / (largest or 1.0)
    if not deviation <= limit:
        raise CheckFailed(f"over codes, {name} is off by {deviation:.2g}")
