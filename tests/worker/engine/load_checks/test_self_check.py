"""The self-check of a load: each model gets the fastest mode that is exact, or a sentence about why there is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from msgspec.structs import replace

from protocol.failures import Code, ExitStatus
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.models import ARCHITECTURES, LANES
from worker.engine.load_checks import SAMPLE_TOKENS, choose
from worker.errors import LoadFailed
from worker.model.batch_mode import BatchMode, BatchModePlan
from worker.model.packing import PackedRows, packing_of
from worker.start.checked_model import load_checked

IDS = [20 + 7 * at for at in range(SAMPLE_TOKENS)]


def nothing(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


class Wrapped:
    """A real model with a fault of its own."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return self._model(inputs, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class WrongInChunks(Wrapped):
    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        logits = super().__call__(inputs, *args, **kwargs)
        self.chunks = self.chunks + 1 if inputs.shape[1] > 1 else 0
        self.seen = self.chunks if self.chunks else self.seen
        return logits * (1.1 if self.seen > 1 else 1.0)

    chunks = 0
    seen = 0


class Raising(Wrapped):
    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        raise ValueError("operands could not be broadcast\nwith a second line")


class Short(Wrapped):
    """Finds no memory for one forward pass."""

    def __init__(self, model: Any, fails_at: int = 0) -> None:
        super().__init__(model)
        self.passes = 0
        self._fails_at = fails_at

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self.passes += 1
        if self.passes == self._fails_at:
            raise RuntimeError("[malloc] Unable to allocate 1073741824 bytes.")
        return super().__call__(inputs, *args, **kwargs)


class Endless(Wrapped):
    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        return super().__call__(inputs, *args, **kwargs) * float("nan")


class WrongAfterOthers(Wrapped):
    """Right for prompts that begin at their first token, wrong for those that begin with KV."""

    def __call__(self, inputs: mx.array, *args: Any, cache: Any = None, **kwargs: Any) -> mx.array:
        if isinstance(cache[0], PackedRows):
            return super().__call__(inputs, *args, cache=cache, **kwargs)
        if cache[0].empty():
            self.begun.append(cache[0])
            self.is_wrong = False
        elif inputs.shape[1] > 1 and not any(layer is cache[0] for layer in self.begun):
            self.is_wrong = True
        return super().__call__(inputs, *args, cache=cache, **kwargs) * (1.1 if self.is_wrong else 1.0)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.begun: list[Any] = []
        self.is_wrong = False


class WrongPacked(Wrapped):
    """Wrong in passes of more than one part."""

    def __call__(self, inputs: mx.array, *args: Any, cache: Any = None, **kwargs: Any) -> mx.array:
        is_packed = isinstance(cache[0], PackedRows)
        return super().__call__(inputs, *args, cache=cache, **kwargs) * (1.1 if is_packed else 1.0)


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *LANES])
def test_each_model_gets_the_fastest_lane_that_is_exact(architecture: str, model_folder: Callable[[str], Path]) -> None:
    loaded = load_checked(spec(model_folder(architecture)), nothing)
    plan = loaded.plan
    assert plan.mode == LANES.get(architecture, "together")
    assert architecture in LANES or packing_of(loaded.model) is not None, "prompts are fused into the steps of its rows"
    assert plan.reuses_prefixes
    assert bool(plan.reason) == (architecture in LANES)


def test_a_plan_says_what_is_given_up_and_why(model_folder: Callable[[str], Path]) -> None:
    reasons = {name: load_checked(spec(model_folder(name)), nothing).plan.reason for name in LANES}
    assert reasons["mamba"].startswith(
        "prompts are prefilled in chunks of equal length, because beside a longer one a prompt's log-probabilities are"
    )
    assert "requests run one at a time, because beside a longer one" in reasons["afm7"]
    assert "requests run one at a time, because ValueError: " in reasons["gpt_bigcode"]
    assert reasons["llama4"] == "requests run one at a time, because mlx-lm has no batch form of its caches"


def test_a_lane_of_one_row_runs_one_request_and_keeps_the_others_waiting(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("gpt_bigcode"))) as engine:
        assert engine.engine.max_running == 1


@pytest.mark.parametrize("batching", ["together", "equal", "single"])
def test_the_operators_lane_is_taken_unchecked(batching: str, model_folder: Callable[[str], Path]) -> None:
    assert load_checked(spec(model_folder("mamba"), batching=batching), nothing).plan == BatchModePlan(
        BatchMode(batching)
    )


def test_a_model_that_cannot_be_batched_is_refused_another_lane_than_its_own(
    model_folder: Callable[[str], Path],
) -> None:
    with pytest.raises(LoadFailed, match="use 'single'") as caught:
        load_checked(spec(model_folder("llama4"), batching="together"), nothing)
    assert caught.value.exit_status is ExitStatus.BAD_CONFIG


def test_a_model_that_is_wrong_even_alone_is_refused(model_folder: Callable[[str], Path]) -> None:
    model = load_checked(spec(model_folder("qwen3")), nothing).model
    with pytest.raises(LoadFailed, match="in chunks, a prompt's log-probabilities are off by") as caught:
        choose(WrongInChunks(model), IDS, "auto")
    assert caught.value.exit_status is ExitStatus.MODEL_UNUSABLE


def test_a_forward_pass_that_raises_is_a_refusal_with_its_reason(model_folder: Callable[[str], Path]) -> None:
    model = load_checked(spec(model_folder("qwen3")), nothing).model
    with pytest.raises(LoadFailed, match=r"mlx-lm cannot run this model: ValueError: .* broadcast$") as caught:
        choose(Raising(model), IDS, "auto")
    assert caught.value.exit_status is ExitStatus.MODEL_UNUSABLE
    with pytest.raises(LoadFailed, match="mlx-lm cannot run this model"):
        EngineHarness(spec(model_folder("qwen3"), batching="together"), wrap=Raising).__enter__()


def test_a_check_that_finds_no_memory_says_so_and_chooses_no_lane(model_folder: Callable[[str], Path]) -> None:
    model = load_checked(spec(model_folder("qwen3")), nothing).model
    whole = Short(model)
    choose(whole, IDS, "auto")
    for fails_at in (1, whole.passes // 2, whole.passes):
        with pytest.raises(LoadFailed, match="not enough memory") as caught:
            choose(Short(model, fails_at), IDS, "auto")
        assert caught.value.exit_status is ExitStatus.OUT_OF_MEMORY


def test_weights_that_give_no_numbers_are_refused(model_folder: Callable[[str], Path]) -> None:
    model = load_checked(spec(model_folder("qwen3")), nothing).model
    with pytest.raises(LoadFailed, match="not finite") as caught:
        choose(Endless(model), IDS, "auto")
    assert caught.value.failure.code is Code.MODEL_CORRUPT


def test_a_model_that_is_wrong_after_cached_prefixes_reuses_none(model_folder: Callable[[str], Path]) -> None:
    model = load_checked(spec(model_folder("qwen3")), nothing).model
    plan = choose(WrongAfterOthers(model), IDS, "auto")
    assert plan.mode is BatchMode.TOGETHER
    assert not plan.reuses_prefixes
    assert plan.reason.startswith("prefixes are not reused, because from the prefix cache a prompt's")


def test_a_model_that_is_wrong_when_packed_runs_separate_prefill(model_folder: Callable[[str], Path]) -> None:
    model = WrongPacked(load_checked(spec(model_folder("qwen3")), nothing).model)
    plan = choose(model, IDS, "auto")
    assert (plan.mode, plan.reuses_prefixes) == (BatchMode.TOGETHER, True)
    assert plan.reason.startswith("prompts run in forward passes of their own, because behind a row that generates a")
    assert packing_of(model) is None


class Recording(Wrapped):
    """Remembers the shape of every forward pass."""

    def __call__(self, inputs: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        self.shapes.append(inputs.shape)
        return super().__call__(inputs, *args, **kwargs)

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.shapes: list[tuple[int, ...]] = []


def test_a_deterministic_model_computes_the_same_shapes_whatever_else_runs(model_folder: Callable[[str], Path]) -> None:
    long, short = (
        Generate(rid, TokensPrompt(tuple(20 + (rid + at) % 400 for at in range(length))), Sampling(0.0), max_tokens=2)
        for rid, length in ((1, 300), (2, 30))
    )
    wanted = spec(model_folder("qwen3"), prefill_chunk=64, deterministic=True)
    with EngineHarness(wanted, wrap=Recording) as engine:
        seen = engine.loaded.model.shapes
        for requests in ([long], [long], [short, long, replace(long, rid=3)]):
            seen.clear()
            results = engine.run(requests)
            chunks = [tokens for rows, tokens in seen if tokens > 1]
            once = [64, 64, 64, 64, 43]
            assert chunks == ([29] if short in requests else []) + once * sum(request.rid != 2 for request in requests)
            assert {rows for rows, _ in seen} == {1}
            assert all(result.usage is not None and result.usage.cached == 0 for result in results)
