"""Rows that have ended: nothing that fails when they are released reaches another row, or ends the worker."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from protocol.from_worker import Finish
from protocol.to_worker import Abort, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import KINDS, VOCAB
from tests.support.prefix_checks import check_cache
from tests.support.scale import scaled
from worker.kv import batched
from worker.prefix_cache.cache_and_eviction import PrefixCache

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
# Caches of plain KV, of windows, of recurrent layers beside KV, and of recurrent layers alone, in a lane of equal rows.
EVERY = (*scaled((*KINDS, "qwen3_next"), ("qwen3_5",)), "mamba")
PHASES = ("waiting", "waiting for its turn", "prefill", "scores", "decode")
rids = itertools.count(1)


def ids(count: int, seed: int) -> TokensPrompt:
    rng = random.Random(seed)
    return TokensPrompt(tuple(rng.randrange(10, VOCAB) for _ in range(count)))


def stream(seed: int = 1, max_tokens: int = 400) -> Generate:
    return Generate(next(rids), ids(12, seed), GREEDY, max_tokens)


def score(count: int, seed: int, max_tokens: int = 0) -> Generate:
    prompt, salt = ids(count, seed), f"{seed}"
    return Generate(next(rids), prompt, GREEDY, max_tokens, top_logprobs=1, echo=True, cache_salt=salt)


def abort(engine: EngineHarness, requests: Sequence[Generate], results: Sequence[Result]) -> None:
    engine.command(Abort(tuple(request.rid for request in requests)))
    engine.wait(lambda: all(result.terminals for result in results), "the ends of the aborted rows")
    assert [result.finish for result in results] == [Finish.ABORT] * len(results)


@pytest.mark.parametrize("architecture", EVERY)
def test_scores_of_one_token_alone_need_no_step_and_end_nobody_else(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    with EngineHarness(spec(model_folder(architecture), cache_bytes=1 << 26)) as engine:
        beside = stream()
        alone = engine.run([beside])[0].ids
        assert engine.run([score(1, 1)])[0].finish is Finish.LENGTH
        running = engine.submit(stream())
        engine.wait(lambda: running.ids)
        for _ in range(2):
            scored = engine.run([score(1, 1), score(1, 2)])
            assert [(each.finish, len(each.logprobs)) for each in scored] == [(Finish.LENGTH, 1)] * 2
        engine.wait(lambda: running.terminals)
        assert running.ids == alone
        assert engine.gauges.cache.prefix_failures == 0


@pytest.mark.soak
@pytest.mark.parametrize("architecture", scaled(KINDS, ["qwen3_5"]))
def test_rows_can_be_aborted_in_every_phase(architecture: str, model_folder: Callable[[str], Path]) -> None:
    settings: dict[str, Any] = {"max_running": 5, "prefill_chunk": 16, "cache_bytes": 1 << 26, "speculate": "off"}
    with EngineHarness(spec(model_folder(architecture), **settings)) as engine:
        alone = engine.run([stream(max_tokens=scaled(1200, 600))])[0].ids
        running = engine.submit(stream(max_tokens=scaled(1200, 600)))
        engine.wait(lambda: running.ids)
        for phase in PHASES * scaled(2, 1):
            is_scored = phase in ("waiting for its turn", "scores")
            count = {"waiting": 8, "waiting for its turn": 4}.get(phase, 1)
            size = 4 if phase in ("waiting", "decode") else 900
            made = [score(size, seed, 900) if is_scored else stream(seed, 900) for seed in range(50, 50 + count)]
            if phase == "prefill":
                made = [Generate(next(rids), ids(size, 60), GREEDY, 900, want_progress=True)]
            results = [engine.submit(request) for request in made]
            reached: dict[str, Callable[[], Any]] = {
                "prefill": lambda found=results: found[0].progress,
                "scores": lambda found=results: engine.gauges.running > 1,
                "decode": lambda found=results: found[0].ids,
            }
            engine.wait(reached.get(phase, lambda found=results: all(each.accepted for each in found)), phase)
            abort(engine, made, results)
        assert engine.run([stream(7, 3)])[0].finish is Finish.LENGTH
        engine.wait(lambda: running.terminals)
        assert running.ids == alone
        assert engine.gauges.cache.prefix_failures == 0
        check_cache(engine.engine.cache)


class Fails:
    """A step of a release that raises each time, once it `is_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.is_on = False
        self.count = 0
        step = getattr(owner, name)

        def fail(*args: Any, **settings: Any) -> Any:
            if self.is_on:
                self.count += 1
                raise RuntimeError(f"{name} failed")
            return step(*args, **settings)

        monkeypatch.setattr(owner, name, fail)


@pytest.mark.parametrize("architecture", scaled(KINDS, ["gemma3_text"]))
@pytest.mark.parametrize(("owner", "name"), [(batched, "extract"), (batched, "keep"), (PrefixCache, "store")])
def test_a_release_that_fails_leaves_the_tokens_of_all_others_as_they_are(
    architecture: str, owner: Any, name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Fails(monkeypatch, owner, name)
    with EngineHarness(spec(model_folder(architecture), cache_bytes=1 << 26, speculate="off")) as engine:
        alone = [engine.run([stream(seed, scaled(400, 120))])[0].ids for seed in (1, 2)]
        running = [engine.submit(stream(seed, scaled(400, 120))) for seed in (1, 2)]
        engine.wait(lambda: all(result.ids for result in running))
        for seed in (3, 4, 5):
            request = stream(seed, 500)
            result = engine.submit(request)
            engine.wait(lambda found=result: found.ids)
            before = fails.count
            fails.is_on = True
            abort(engine, [request], [result])
            engine.wait(lambda count=before: fails.count > count, "the failure")
            fails.is_on = False
        engine.wait(lambda: all(result.terminals for result in running))
        assert [result.ids for result in running] == alone
        assert engine.engine.cache.counts.prefix_failures >= 3
    # The engine stores the KV of a row after the end of its answer.
    check_cache(engine.engine.cache)


@pytest.mark.parametrize("name", ["extract", "store"])
def test_what_an_answer_cannot_leave_in_the_cache_is_no_failure_of_the_answer(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = Fails(monkeypatch, batched if name == "extract" else PrefixCache, name)
    with EngineHarness(spec(model_folder("qwen3_5"), cache_bytes=1 << 26)) as engine:
        requests = [stream(seed, 12) for seed in (1, 2, 3)]
        alone = [engine.run([request])[0].ids for request in requests]
        engine.engine.cache.clear()
        fails.is_on = True
        again = engine.run([stream(seed, 12) for seed in (1, 2, 3)])
        fails.is_on = False
        assert [(result.ids, result.finish) for result in again] == [(each, Finish.LENGTH) for each in alone]
        assert engine.run([stream(1, 12)])[0].ids == alone[0]
        assert engine.engine.cache.counts.prefix_failures >= 3
