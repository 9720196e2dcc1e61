"""The self-check of a load: which lane gives every row its own tokens, whatever rows run beside it.

Some of mlx-lm's architectures compute a padded row wrongly, or raise beside a second one. So a few short prompts run
alone on the model's own caches, which is the reference, and then as the engine would run them: together, cut into
chunks, from the prefix cache. Log-probabilities are compared: tokens alone can agree by luck.
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
from worker.model.packing import give_up, packing_of
from worker.prefix_cache.prefix import PrefixCache

log = logging.getLogger("mlxd.worker")

# Unequal, and the longer one is two chunks and its last token.
SHORT: Final = 4
LONG: Final = 11
CHUNK: Final = 5
# Of the longer one, what another prompt leaves in the prefix cache.
SHARED: Final = 8
# Tokens that a check needs, and the text that they are of.
SAMPLE: Final = SHORT + LONG
_TEXT: Final = "The river was low that summer, and the people of the town walked across it on stones to the market."
# Tokens that each row generates: the shorter one's third is decoded beside the longer one in every mode.
OUTPUT: Final = 3
_WHOLE: Final = 16
_CACHE_BYTES: Final = 1 << 40
# Of this many likeliest tokens, how far log-probabilities may be from the reference, each weighted by its probability:
# in float32 on a CPU; and where kernels and formats of 16 bits round by shape, this many times what cutting a prompt
# into chunks changes. Beyond the last, chunks themselves are wrong.
TOP: Final = 16
EXACT: Final = 1e-3
ROUNDINGS: Final = 4.0
ROUNDED_MIN: Final = 0.1
ROUNDED_MAX: Final = 0.5
ROUNDED_REFUSED: Final = 1.0
# Signs of a device that failed, or of memory that is not there: they say nothing of the mode.
_MODES: Final = (BatchMode.TOGETHER, BatchMode.EQUAL, BatchMode.SINGLE)
_TOLD: Final = {
    BatchMode.EQUAL: "prompts are prefilled in chunks of equal length",
    BatchMode.SINGLE: "requests run one at a time",
}


@dataclass(slots=True)
class _Said:
    """Tokens of one row, and before each the likeliest ones with their log-probabilities."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[mx.array] = field(default_factory=list)


class CheckFailed(Exception):
    """A way of running rows that changes what they say; the message says which, and how."""


def choose(
    model: Any, ids: Sequence[int], batching: str, partners: RankPeers | None = None, attend: Attend | None = None
) -> BatchModePlan:
    """The first lane that is exact. `ids` are at least `SAMPLE` tokens of text. Raises `LoadFailed`.

    `batching` is `auto`, or the lane that the operator wants: such a one is taken as it is, without packed passes and
    kernels of ours. `attend` stands for the kernels, which need a GPU.
    """
    mergeable = all(hasattr(cache, "merge") for cache in make_caches(model))
    attend = attend or (kernel.attend if memory.has_gpu() else None)
    if batching != "auto":
        give_up(model)
        reason = f", because batching = '{batching}'" if attend is not None else ""
        return replace(_asked(BatchMode(batching), mergeable), attention=f"mlx{reason}")
    started = time.monotonic()
    check = _Check(model, ids, partners)
    plan = check.plan(mergeable)
    plan = replace(plan, attention=check.attention(plan.mode, attend))
    took_ms = (time.monotonic() - started) * 1e3
    log.info("self-check: lane %s, attention by %s, in %.0f ms", plan.mode, plan.attention, took_ms)
    if plan.reason:
        log.warning("%s", plan.reason)
    return plan


def sample(tokenizer: Any, vocab_size: int) -> list[int]:
    """Tokens of an ordinary text for the self-check, and others where that is too short."""
    ids = [token for token in tokenizer.encode(_TEXT) if token < vocab_size]
    return ids + [(20 + 7 * at) % vocab_size for at in range(SAMPLE - len(ids))]


def refusal(error: Exception) -> LoadFailed:
    """A forward pass of a model that has just been loaded raised. Raises faults of the device again."""
    message = f"mlx-lm cannot run this model: {reason_of(error)}"
    return LoadFailed(Code.MODEL_UNSUPPORTED, message, detail=repr(error))


def _asked(mode: BatchMode, mergeable: bool) -> BatchModePlan:
    if not mergeable and mode is not BatchMode.SINGLE:
        raise LoadFailed(Code.BAD_CONFIG, f"batching = '{mode}', but mlx-lm cannot batch this model; use 'single'")
    return BatchModePlan(mode)


class _Check:
    def __init__(self, model: Any, ids: Sequence[int], partners: RankPeers | None) -> None:
        self._model = model
        self._partners = partners
        self._prompts = [list(ids[:SHORT]), list(ids[SHORT : SHORT + LONG])]
        self._layout = KvLayout.of(lambda: make_caches(model))
        # Set by the reference.
        self._limit = 0.0

    def plan(self, mergeable: bool) -> BatchModePlan:
        expected = self._reference()
        why = "" if mergeable else "mlx-lm has no batch form of its caches"
        for mode in _MODES if mergeable else (BatchMode.SINGLE,):
            try:
                return self._plan(mode, expected, [f"{_TOLD[mode]}, because {why}"] if why else [])
            except (LoadFailed, StepFailed):
                raise
            except Exception as error:  # the boundary to code of every architecture
                why = reason_of(error)
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"mlx-lm computes this model wrongly: {why}")

    def _reference(self) -> list[_Said]:
        """Each prompt alone, which must be what it is in chunks."""
        with foreign_code(refusal):
            expected = [self._alone(prompt, _WHOLE) for prompt in self._prompts]
            chunked = self._alone(self._prompts[1], CHUNK)
        steps = [step for said in expected for step in said.logprobs]
        if not all(bool(mx.isfinite(mx.max(step))) for step in steps):
            raise LoadFailed(Code.MODEL_CORRUPT, "the model's log-probabilities are not finite: its weights are broken")
        # A rounding error may move a number to the next code.
        is_exact = steps[0].dtype == mx.float32 and not memory.has_gpu() and kv_form_of(self._model) is None
        drift = _drift([chunked], expected[1:])
        if not drift <= (EXACT if is_exact else ROUNDED_REFUSED):
            why = f"in chunks, a prompt's log-probabilities are off by {drift:.2g}"
            raise LoadFailed(Code.MODEL_UNSUPPORTED, f"mlx-lm computes this model wrongly: {why}")
        self._limit = EXACT if is_exact else min(max(ROUNDED_MIN, ROUNDINGS * drift), ROUNDED_MAX)
        return expected

    def _plan(self, mode: BatchMode, expected: list[_Said], reasons: list[str]) -> BatchModePlan:
        """Raises `CheckFailed`, or what the model raises, if the mode is not exact."""
        if mode is not BatchMode.SINGLE:
            self._compare("beside a longer one", self._run(mode, [self._prompts], _WHOLE), expected)
            reasons = [*reasons, *self._check_packing(mode, expected)]
        try:
            # The rows in chunks, after one that has left the beginning of the longer one in the cache.
            waves = [[self._prompts[1][:SHARED]], self._prompts]
            self._compare("from the prefix cache", self._run(mode, waves, CHUNK, _CACHE_BYTES)[1:], expected)
        except Exception as error:  # the boundary to code of every architecture
            why = reason_of(error)
            self._compare("beside a longer one, in chunks", self._run(mode, [self._prompts], CHUNK), expected)
            return BatchModePlan(mode, False, "; ".join([*reasons, f"prefixes are not reused, because {why}"]))
        return BatchModePlan(mode, True, "; ".join(reasons))

    def _check_packing(self, mode: BatchMode, expected: list[_Said]) -> list[str]:
        """Give packed passes up where they are not exact; the reason."""
        if packing_of(self._model) is None:
            return []
        try:
            self._compare("behind a row that generates", self._run(mode, [self._prompts], CHUNK, begun=1), expected)
        except LoadFailed:
            raise
        except Exception as error:  # the boundary to code of every architecture
            give_up(self._model)
            return [f"prompts run in forward passes of their own, because {reason_of(error)}"]
        return []

    def attention(self, mode: BatchMode, attend: Attend | None) -> str:
        """Let kernels answer where they are right on this machine and in this model; `kernel`, or `mlx` and why."""
        if attend is None:
            return "mlx"
        switch = AttentionSwitch(attend)
        if self._partners is not None:
            return "mlx, because several processes run this model together"
        if not join(self._model, switch):
            return "mlx, because its attention has another form in mlx-lm"
        try:
            with switch.record_forms() as met:
                expected = self._run(mode, [self._prompts], _WHOLE)
            if not met:
                return "mlx, because there is no kernel for its heads or caches"
            for form in met:
                prove(form, switch.attend)
            switch.proved = frozenset(met)
            self._compare("by the kernel, beside a longer one", self._run(mode, [self._prompts], _WHOLE), expected)
        except LoadFailed:
            raise
        except Exception as error:  # the boundary to compilers of each machine, and code of every architecture
            switch.proved = frozenset()
            return f"mlx, because {reason_of(error)}"
        return KERNEL

    def _alone(self, prompt: list[int], chunk: int) -> _Said:
        return self._run(BatchMode.SINGLE, [[prompt]], chunk)[0]

    def _run(
        self, mode: BatchMode, waves: Sequence[Sequence[list[int]]], chunk: int, cache_bytes: int = 0, begun: int = 0
    ) -> list[_Said]:
        """Each wave together, one after the other, through a batch of their own; the first `begun` rows of a wave
        generate when the others come."""
        if self._partners is not None:
            cache = self._partners.cache(self._layout, cache_bytes)
            batch = self._partners.batch(self._model, (), cache, mode)
        else:
            cache = PrefixCache(self._layout, cache_bytes)
            batch = Batch(self._model, (), cache, mode)
        said: list[_Said] = []
        with ExitStack() as undo:
            undo.callback(batch.close)
            undo.callback(batch.abandon)
            for wave in waves:
                said += _listen(batch, wave, chunk, begun)
                batch.settle()
                if cache.failure is not None:
                    raise cache.failure
            undo.pop_all()
        batch.close()
        return said

    def _compare(self, how: str, said: Sequence[_Said], expected: Sequence[_Said]) -> None:
        """Raise `CheckFailed` where rows differ by more than rounding explains."""
        drift = _drift(said, expected)
        if not drift <= self._limit:
            raise CheckFailed(f"{how} a prompt's log-probabilities are off by {drift:.2g}")


def _drift(said: Sequence[_Said], expected: Sequence[_Said]) -> float:
    """Largest deviation of the likeliest tokens' log-probabilities over all steps; nan where one is not a number."""
    drifts = [0.0]
    for one, other in zip(said, expected, strict=True):
        for step, wanted in enumerate(other.logprobs):
            if one.ids[:step] != other.ids[:step]:
                break  # a tie went the other way: what follows it is of another text
            top = mx.argsort(-wanted)[:TOP]
            one_top, top = (logprobs[top].astype(mx.float32) for logprobs in (one.logprobs[step], wanted))
            drifts.append(float(cast(float, mx.sum(mx.softmax(top) * mx.abs(one_top - top)).item())))
    return math.nan if any(math.isnan(drift) for drift in drifts) else max(drifts)


def _listen(batch: Batch, prompts: Sequence[list[int]], chunk: int, begun: int = 0) -> list[_Said]:
    said = [_Said() for _ in prompts]
    rows = [silent_row(rid, prompt, OUTPUT) for rid, prompt in enumerate(prompts)]
    for row in rows[:begun]:
        batch.insert(row)
    while batch or begun < len(rows):
        if all(each.ids for each in said[:begun]):
            for row in rows[begun:]:
                batch.insert(row)
            begun = len(rows)
        for token in batch.step(chunk).tokens:
            said[token.row.rid].ids.append(token.id)
            said[token.row.rid].logprobs.append(token.logprobs)
    return said


def reason_of(error: Exception) -> str:
    """The reason for a person. Raises what says nothing of the model."""
    text = str(error)
    if is_allocation_failure(error):
        raise LoadFailed(Code.OUT_OF_MEMORY, "not enough memory to run the model", detail=text) from error
    if is_gpu_fault(error) or isinstance(error, StepFailed):
        raise error
    if isinstance(error, CheckFailed | NotProved):
        return text
    return f"{type(error).__name__}: {text.partition(chr(10))[0]}"
