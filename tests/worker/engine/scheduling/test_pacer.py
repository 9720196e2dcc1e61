"""Rests of a running engine: aborts are seen in them, no token depends on them, and no time is learned from them."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.from_worker import Finish
from protocol.spec import WorkerSpec
from protocol.to_worker import Abort, Generate, Sampling, SetPace, TokensPrompt
from tests.support.engine import EngineHarness, spec
from worker.engine.scheduling.pacing import Pacer, PassTime

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


def prompt(tokens: int) -> TokensPrompt:
    return TokensPrompt(tuple(10 + at % 50 for at in range(tokens)))


@pytest.fixture
def settings(model_folder: Callable[[str], Path]) -> WorkerSpec:
    return spec(model_folder("qwen3"), prefill_chunk=64, cache_bytes=0)


def test_tokens_are_the_same_with_and_without_rests(settings: WorkerSpec) -> None:
    requests = [Generate(rid, prompt(30 * rid), GREEDY, max_tokens=12) for rid in (1, 2, 3)]
    with EngineHarness(settings) as engine:
        alone = [result.ids for result in engine.run(requests)]
    with EngineHarness(settings) as engine:
        engine.command(SetPace(0.5, 60, 32))
        assert [result.ids for result in engine.run(requests)] == alone


def test_an_abort_in_a_rest_is_heard_before_its_end(settings: WorkerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.scheduling.pacing.MAX_REST_S", 3600.0)
    # A tick seems to have taken an hour.
    monkeypatch.setattr(Pacer, "worked", lambda pacer, began: pacer.duty_cycle.worked(began - 3600, time.monotonic()))
    with EngineHarness(settings) as engine:
        engine.command(SetPace(0.5))
        result = engine.submit(Generate(1, prompt(8), GREEDY, max_tokens=None))
        engine.wait(lambda: result.accepted is not None, "its place")
        engine.command(Abort((1,)))
        engine.wait(lambda: result.terminals == 1, "its end")
        assert result.finish is Finish.ABORT


def test_the_time_of_a_rest_is_no_time_of_a_step(settings: WorkerSpec) -> None:
    with EngineHarness(settings) as engine:
        seen: list[float] = []
        pacer = engine.engine.pacer
        observe = pacer.observe

        def observed(each: PassTime) -> None:
            seen.append(each.seconds)
            observe(each)

        pacer.observe = observed  # type: ignore[method-assign]
        (full,) = engine.run([Generate(1, prompt(8), GREEDY, max_tokens=40)])
        seen.clear()
        engine.command(SetPace(0.05))
        (rested,) = engine.run([Generate(2, prompt(8), GREEDY, max_tokens=40)])
        assert rested.ids == full.ids
        # A rest is nineteen times as long as the work before it, however fast the machine is.
        assert 0.0 < sum(seen) < pacer.duty_cycle.total_s
        engine.command(SetPace())
