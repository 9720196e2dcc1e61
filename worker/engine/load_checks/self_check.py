"""Self-check of a load: finds the fastest batch mode in which no row changes the tokens of another.

Some of mlx-lm's architectures compute a padded row wrongly, or raise with a second row. So two short prompts run alone
on the model's own caches, which is the reference, and then as the engine would run them: together, cut into chunks,
from the prefix cache. Log-probabilities are compared, because tokens can agree by chance.
"""

import logging
import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

import mlx.core as mx

from protocol.failures import Code
from worker.attention import kernel
from worker.attention.kernel import Attend
from worker.attention.seam import AttentionSwitch, join
from worker.attention.trial import NotProved, prove
from worker.engine.batch import Batch
from worker.engine.load_checks.silent_row import silent_row
from worker.engine.rank_peers import RankPeers
from worker.errors import LoadFailed, StepFailed, foreign_code, is_allocation_failure, is_gpu_fault
from worker.kv.kv import KvLayout
from worker.kv.quantized import kv_form_of, make_caches
from worker.model import memory
from worker.model.batch_mode import KERNEL, BatchMode, BatchModePlan
from worker.model.packing import disable_packing, packing_of
from worker.prefix_cache.prefix import PrefixCache

log = logging.getLogger("mlxd.worker")

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
                batch.settle()
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
