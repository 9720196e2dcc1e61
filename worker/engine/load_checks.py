"""Checks at model load that a fast path gives the same tokens as the plain path.

Rows without text, for checks and the warm-up.

Check at model load that a model can run a prompt with gaps, for sparse prefill: the model must take positions from
its caches.

Log-probabilities after a gap are compared with those of the whole text in which the tokens of the gap are masked.

Self-check of a load: finds the fastest batch mode in which no row changes the tokens of another.

Some of mlx-lm's architectures compute a padded row wrongly, or raise with a second row. So two short prompts run alone
on the model's own caches, which is the reference, and then as the engine would run them: together, cut into chunks,
from the prefix cache. Log-probabilities are compared, because tokens can agree by chance.

Check of quantized KV at load: whether the model supports it, and whether attention over its codes is right.

Kernels that multiply with codes have been wrong for some sizes of heads, and some devices lack them. So attention over
codes is compared with attention over dequantized numbers, for the model's heads and for the model itself. If they
differ, or codes cannot be used, a layer's KV is dequantized for each pass.
"""

import logging
import math
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache

from protocol.checkpoint import ALL_WHOLE, group_of_all, obstacle
from protocol.failures import Code
from protocol.to_worker import Sampling
from worker.attention import kernel
from worker.attention.kernel import Attend, AttentionSwitch, NotProved, join, prove
from worker.engine.batch import Batch
from worker.engine.rank_peers import RankPeers
from worker.engine.row import Row, RowStats, RowText
from worker.errors import LoadFailed, StepFailed, foreign_code, is_allocation_failure, is_gpu_fault
from worker.kv import batched
from worker.kv.quantized import KvForm, QuantizedKV, kv_form_of, make_caches, quantized, set_kv_form
from worker.kv.ragged import Lengths, RaggedKVCache
from worker.kv.spans_and_checkpoints import KvLayout, leaves
from worker.model import memory
from worker.model.batch_mode import KERNEL, BatchMode, BatchModePlan
from worker.model.packing import disable_packing, packing_of
from worker.output.stops import StopScanner
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.sparse_prefill import SelectedTokens

log = logging.getLogger("mlxd.worker")


class _NullDetokenizer:
    """Detokenizer of a row without text."""

    def add(self, token: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def silent_row(
    rid: int, prompt: list[int], max_tokens: int, *, ignore_eos: bool = True, stop_ids: Sequence[int] = ()
) -> Row:
    """Return a greedy row whose tokens are not decoded."""
    return Row(
        rid=rid,
        prompt=prompt,
        sampling=Sampling(temperature=0.0, ignore_eos=ignore_eos, stop_ids=tuple(stop_ids)),
        max_tokens=max_tokens,
        text=RowText(_NullDetokenizer(), StopScanner(())),
        stats=RowStats(time.monotonic()),
    )


PROMPT_TOKENS: Final = 24
# Tokens [begin, end) of the two runs; the tokens between them are the gap.
_RUNS: Final = ((0, 6), (13, PROMPT_TOKENS))
# Maximum deviation of the top tokens' log-probabilities in float32.
GAP_EXACT_LIMIT: Final = 1e-3
# Maximum deviation of the top tokens' log-probabilities in 16 bits.
ROUNDED_LIMIT: Final = 0.5
_TOP_TOKENS: Final = 8


class _GapMaskCache:
    """Cache of one row whose mask hides the gap from the tokens after it."""

    def __init__(self, cache: RaggedKVCache) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, count: int, *_args: Any, **_named: Any) -> mx.array:
        rows, slots = mx.arange(count)[:, None], mx.arange(self._cache.lengths.seen(count))[None]
        begin, end = _RUNS[0][1], _RUNS[1][0]
        is_hidden = (slots >= begin) & (slots < end) & (rows >= end)
        return ((slots <= rows) & ~is_hidden)[None, None]


def gap_reason(model: Any, vocab_size: int) -> str:
    """Return the reason why this model cannot have gaps in a prompt; empty if it can."""
    caches = make_caches(model)
    if any(not isinstance(leaf, RaggedKVCache) for leaf in leaves(batched.merge([caches]))):
        return "some of its layers keep a sliding window or a recurrent state, which needs every token"
    ids = [(20 + 7 * at) % vocab_size for at in range(PROMPT_TOKENS)]
    try:
        whole, sparse = _whole(model, ids), _sparse(model, ids)
        is_exact = whole.dtype == mx.float32 and mx.default_device() == mx.cpu
        whole, sparse = whole.astype(mx.float32), sparse.astype(mx.float32)
        mx.eval(whole, sparse)
    except Exception as error:  # code of any architecture may raise any error
        return f"{type(error).__name__}: {error}"
    top = mx.argpartition(-whole, kth=_TOP_TOKENS - 1)[:_TOP_TOKENS]
    deviation: Any = mx.abs(whole[top] - sparse[top]).max().item()
    if not deviation <= (GAP_EXACT_LIMIT if is_exact else ROUNDED_LIMIT):
        return f"its positions do not follow its caches: log-probabilities behind a gap differ by {deviation:.2g}"
    return ""


def _whole(model: Any, ids: list[int]) -> mx.array:
    caches = batched.merge([make_caches(model)])
    return _last(model(mx.array([ids]), cache=[_hiding(cache) for cache in caches]))


def _sparse(model: Any, ids: list[int]) -> mx.array:
    caches, kept, done = batched.merge([make_caches(model)]), SelectedTokens(_RUNS), 0
    logits = mx.array([])
    for begin, end in kept.runs:
        batched.place(caches, [kept.position_offset(done)])
        logits = model(mx.array([ids[begin:end]]), cache=caches)
        done += end - begin
    return _last(logits)


def _hiding(cache: Any) -> Any:
    children = getattr(cache, "caches", None)
    return type(cache)(*map(_hiding, children)) if children is not None else _GapMaskCache(cache)


def _last(logits: mx.array) -> mx.array:
    """Return log-probabilities after the last token."""
    last = logits[0, -1]
    return last - mx.logsumexp(last)


# The prompts differ in length. The long prompt is two chunks and one last token.
SHORT_PROMPT_TOKENS: Final = 4
LONG_PROMPT_TOKENS: Final = 11
CHUNK_TOKENS: Final = 5
# Length of the long prompt's prefix that an earlier request puts into the cache.
SHARED_PREFIX_TOKENS: Final = 8
SAMPLE_TOKENS: Final = SHORT_PROMPT_TOKENS + LONG_PROMPT_TOKENS
_SAMPLE_TEXT: Final = (
    "The river was low that summer, and the people of the town walked across it on stones to the market."
)
# The short prompt's row generates three tokens, so that it decodes together with the long one's in every mode.
OUTPUT_TOKENS: Final = 3
# A chunk of this size holds each of the two prompts completely.
_WHOLE_PROMPT_TOKENS: Final = 16
_CACHE_BYTES: Final = 1 << 40
# The deviation is that of the top tokens' log-probabilities from the reference, weighted by probability. In float32 on
# a CPU, its limit is EXACT_LIMIT. Otherwise rounding depends on shapes: the limit is ROUNDED_FACTOR times the deviation
# that cutting a prompt into chunks causes, within ROUNDED_MIN_LIMIT and ROUNDED_MAX_LIMIT. If chunks alone deviate by
# more than CHUNKED_LIMIT, the model is refused.
TOP_TOKENS: Final = 16
EXACT_LIMIT: Final = 1e-3
ROUNDED_FACTOR: Final = 4.0
ROUNDED_MIN_LIMIT: Final = 0.1
ROUNDED_MAX_LIMIT: Final = 0.5
CHUNKED_LIMIT: Final = 1.0
# The modes are ordered from fastest to slowest.
_MODES: Final = (BatchMode.TOGETHER, BatchMode.EQUAL, BatchMode.SINGLE)
_MODE_EFFECTS: Final = {
    BatchMode.EQUAL: "prompts are prefilled in chunks of equal length",
    BatchMode.SINGLE: "requests run one at a time",
}


@dataclass(slots=True)
class _RowOutput:
    """Tokens of one row, and the log-probabilities from which each was sampled."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[mx.array] = field(default_factory=list)


class CheckFailed(Exception):
    """Raised if a way to run rows changes their output; the message describes the way and the change."""


def choose(
    model: Any, ids: Sequence[int], batching: str, rank_peers: RankPeers | None = None, attend: Attend | None = None
) -> BatchModePlan:
    """Return the first batch mode that is exact. `ids` are at least `SAMPLE_TOKENS` tokens of text.

    `batching` is `auto`, or a configured mode. A configured mode is used without a check; packed passes and mlxd's
    attention kernels are then off. `attend` replaces the kernels, which need a GPU. Raises `LoadFailed`.
    """
    mergeable = all(hasattr(cache, "merge") for cache in make_caches(model))
    attend = attend or (kernel.attend if memory.has_gpu() else None)
    if batching != "auto":
        disable_packing(model)
        reason = f", because batching = '{batching}'" if attend is not None else ""
        return replace(_configured(BatchMode(batching), mergeable), attention=f"mlx{reason}")
    started = time.monotonic()
    check = _Check(model, ids, rank_peers)
    plan = check.plan(mergeable)
    plan = replace(plan, attention=check.attention(plan.mode, attend))
    took_ms = (time.monotonic() - started) * 1e3
    log.info("self-check: batch mode %s, attention by %s, in %.0f ms", plan.mode, plan.attention, took_ms)
    if plan.reason:
        log.warning("%s", plan.reason)
    return plan


def sample(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return tokens of an ordinary text for the self-check, followed by other ids if the text has too few tokens."""
    ids = [token for token in tokenizer.encode(_SAMPLE_TEXT) if token < vocab_size]
    return ids + [(20 + 7 * at) % vocab_size for at in range(SAMPLE_TOKENS - len(ids))]


def refusal(error: BaseException) -> LoadFailed:
    """Return the failure of a model whose first forward pass raised `error`. Raises faults of the device again."""
    message = f"mlx-lm cannot run this model: {reason_of(error)}"
    return LoadFailed(Code.MODEL_UNSUPPORTED, message, detail=repr(error))


def _configured(mode: BatchMode, mergeable: bool) -> BatchModePlan:
    if not mergeable and mode is not BatchMode.SINGLE:
        raise LoadFailed(Code.BAD_CONFIG, f"batching = '{mode}', but mlx-lm cannot batch this model; use 'single'")
    return BatchModePlan(mode)


class _Check:
    def __init__(self, model: Any, ids: Sequence[int], rank_peers: RankPeers | None) -> None:
        self._model = model
        self._rank_peers = rank_peers
        self._prompts = [
            list(ids[:SHORT_PROMPT_TOKENS]),
            list(ids[SHORT_PROMPT_TOKENS : SHORT_PROMPT_TOKENS + LONG_PROMPT_TOKENS]),
        ]
        self._layout = KvLayout.of(lambda: make_caches(model))
        # Maximum deviation; set by the reference run.
        self._limit = 0.0

    def plan(self, mergeable: bool) -> BatchModePlan:
        expected = self._reference()
        why = "" if mergeable else "mlx-lm has no batch form of its caches"
        for mode in _MODES if mergeable else (BatchMode.SINGLE,):
            try:
                return self._plan(mode, expected, [f"{_MODE_EFFECTS[mode]}, because {why}"] if why else [])
            except (LoadFailed, StepFailed):
                raise
            except Exception as error:  # code of any architecture may raise any error
                why = reason_of(error)
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"mlx-lm computes this model wrongly: {why}")

    def _reference(self) -> list[_RowOutput]:
        """Run each prompt alone, and check that chunks do not change it."""
        with foreign_code(refusal):
            expected = [self._alone(prompt, _WHOLE_PROMPT_TOKENS) for prompt in self._prompts]
            chunked = self._alone(self._prompts[1], CHUNK_TOKENS)
        steps = [step for output in expected for step in output.logprobs]
        if not all(bool(mx.isfinite(mx.max(step))) for step in steps):
            raise LoadFailed(Code.MODEL_CORRUPT, "the model's log-probabilities are not finite: its weights are broken")
        # A rounding error can move a quantized KV value to the next code, so no exact result is expected then.
        is_exact = steps[0].dtype == mx.float32 and not memory.has_gpu() and kv_form_of(self._model) is None
        drift = _drift([chunked], expected[1:])
        if not drift <= (EXACT_LIMIT if is_exact else CHUNKED_LIMIT):
            why = f"in chunks, a prompt's log-probabilities are off by {drift:.2g}"
            raise LoadFailed(Code.MODEL_UNSUPPORTED, f"mlx-lm computes this model wrongly: {why}")
        self._limit = (
            EXACT_LIMIT if is_exact else min(max(ROUNDED_MIN_LIMIT, ROUNDED_FACTOR * drift), ROUNDED_MAX_LIMIT)
        )
        return expected

    def _plan(self, mode: BatchMode, expected: list[_RowOutput], reasons: list[str]) -> BatchModePlan:
        """Check a mode. Raises `CheckFailed`, or an error of the model, if the mode is not exact."""
        if mode is not BatchMode.SINGLE:
            self._compare("beside a longer one", self._run(mode, [self._prompts], _WHOLE_PROMPT_TOKENS), expected)
            reasons = [*reasons, *self._check_packing(mode, expected)]
        try:
            waves = [[self._prompts[1][:SHARED_PREFIX_TOKENS]], self._prompts]
            self._compare("from the prefix cache", self._run(mode, waves, CHUNK_TOKENS, _CACHE_BYTES)[1:], expected)
        except Exception as error:  # code of any architecture may raise any error
            why = reason_of(error)
            self._compare("beside a longer one, in chunks", self._run(mode, [self._prompts], CHUNK_TOKENS), expected)
            return BatchModePlan(mode, False, "; ".join([*reasons, f"prefixes are not reused, because {why}"]))
        return BatchModePlan(mode, True, "; ".join(reasons))

    def _check_packing(self, mode: BatchMode, expected: list[_RowOutput]) -> list[str]:
        """Turn packed passes off if they are not exact. Returns the reason, if any."""
        if packing_of(self._model) is None:
            return []
        try:
            self._compare(
                "behind a row that generates", self._run(mode, [self._prompts], CHUNK_TOKENS, begun=1), expected
            )
        except LoadFailed:
            raise
        except Exception as error:  # code of any architecture may raise any error
            disable_packing(self._model)
            return [f"prompts run in forward passes of their own, because {reason_of(error)}"]
        return []

    def attention(self, mode: BatchMode, attend: Attend | None) -> str:
        """Use mlxd's attention kernels if their results are right on this machine and in this model. Returns `kernel`,
        or `mlx` with the reason."""
        if attend is None:
            return "mlx"
        switch = AttentionSwitch(attend)
        if self._rank_peers is not None:
            return "mlx, because several processes run this model together"
        if not join(self._model, switch):
            return "mlx, because its attention has another form in mlx-lm"
        try:
            with switch.record_forms() as met:
                expected = self._run(mode, [self._prompts], _WHOLE_PROMPT_TOKENS)
            if not met:
                return "mlx, because there is no kernel for its heads or caches"
            for form in met:
                prove(form, switch.attend)
            switch.proved = frozenset(met)
            self._compare(
                "by the kernel, beside a longer one", self._run(mode, [self._prompts], _WHOLE_PROMPT_TOKENS), expected
            )
        except LoadFailed:
            raise
        except Exception as error:  # compilers of any machine and code of any architecture may raise any error
            switch.proved = frozenset()
            return f"mlx, because {reason_of(error)}"
        return KERNEL

    def _alone(self, prompt: list[int], chunk: int) -> _RowOutput:
        return self._run(BatchMode.SINGLE, [[prompt]], chunk)[0]

    def _run(
        self, mode: BatchMode, waves: Sequence[Sequence[list[int]]], chunk: int, cache_bytes: int = 0, begun: int = 0
    ) -> list[_RowOutput]:
        """Run waves of prompts, one after another, through a new batch. The first `begun` rows of a wave generate
        before the wave's other rows are inserted."""
        if self._rank_peers is not None:
            cache = self._rank_peers.cache(self._layout, cache_bytes)
            batch = self._rank_peers.batch(self._model, (), cache, mode)
        else:
            cache = PrefixCache(self._layout, cache_bytes)
            batch = Batch(self._model, (), cache, mode)
        outputs: list[_RowOutput] = []
        with ExitStack() as undo:
            undo.callback(batch.close)
            undo.callback(batch.abandon)
            for wave in waves:
                outputs += _generate(batch, wave, chunk, begun)
                batch.store_ended()
                if cache.failure is not None:
                    raise cache.failure
            undo.pop_all()
        batch.close()
        return outputs

    def _compare(self, how: str, outputs: Sequence[_RowOutput], expected: Sequence[_RowOutput]) -> None:
        """Raise `CheckFailed` if rows differ by more than rounding explains."""
        drift = _drift(outputs, expected)
        if not drift <= self._limit:
            raise CheckFailed(f"{how} a prompt's log-probabilities are off by {drift:.2g}")


def _drift(outputs: Sequence[_RowOutput], expected: Sequence[_RowOutput]) -> float:
    """Return the largest deviation of the top tokens' log-probabilities over all steps; nan if a deviation is not a
    number."""
    drifts = [0.0]
    for output, reference in zip(outputs, expected, strict=True):
        for step, wanted in enumerate(reference.logprobs):
            if output.ids[:step] != reference.ids[:step]:
                break  # a tie was resolved differently, so all later tokens differ
            top = mx.argsort(-wanted)[:TOP_TOKENS]
            output_top, top = (logprobs[top].astype(mx.float32) for logprobs in (output.logprobs[step], wanted))
            drifts.append(float(cast(float, mx.sum(mx.softmax(top) * mx.abs(output_top - top)).item())))
    return math.nan if any(math.isnan(drift) for drift in drifts) else max(drifts)


def _generate(batch: Batch, prompts: Sequence[list[int]], chunk: int, begun: int = 0) -> list[_RowOutput]:
    outputs = [_RowOutput() for _ in prompts]
    rows = [silent_row(rid, prompt, OUTPUT_TOKENS) for rid, prompt in enumerate(prompts)]
    for row in rows[:begun]:
        batch.insert(row)
    while batch or begun < len(rows):
        if all(each.ids for each in outputs[:begun]):
            for row in rows[begun:]:
                batch.insert(row)
            begun = len(rows)
        for token in batch.step(chunk).tokens:
            outputs[token.row.rid].ids.append(token.id)
            outputs[token.row.rid].logprobs.append(token.logprobs)
    return outputs


def reason_of(error: BaseException) -> str:
    """Return a description of a model's error. Raises the error itself if it comes from the device or from a lack of
    memory."""
    text = str(error)
    if is_allocation_failure(error):
        raise LoadFailed(Code.OUT_OF_MEMORY, "not enough memory to run the model", detail=text) from error
    if is_gpu_fault(error) or isinstance(error, StepFailed):
        raise error
    if isinstance(error, CheckFailed | NotProved):
        return text
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"


# The long row must have more than the 1,024 tokens from which MLX uses other kernels, and must not be a multiple of the
# step in which KV grows.
LONG_ROW_TOKENS: Final = 1088
SHORT_ROW_TOKENS: Final = 300
# Maximum deviation in float32, relative to the largest output. A wrong kernel deviates by about 1.
KV_EXACT_LIMIT: Final = 1e-3
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
    limit = KV_EXACT_LIMIT if expected.dtype == mx.float32 else rounded
    output, expected = output.astype(mx.float32), expected.astype(mx.float32)
    largest = cast(float, mx.max(mx.abs(expected)).item())
    deviation = cast(float, mx.max(mx.abs(output - expected)).item()) / (largest or 1.0)
    if not deviation <= limit:
        raise CheckFailed(f"over codes, {name} is off by {deviation:.2g}")
