"""A storm of requests with common beginnings, aborts and faults: whoever finishes says what it says alone."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.from_worker import Finish
from protocol.to_worker import Abort, Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, Result, spec
from tests.support.models import VOCAB, Breakable
from tests.support.scale import scaled

Outcome = tuple[tuple[int, ...], str, Finish | None]


def storm(seed: int, count: int) -> list[Generate]:
    """Prompts that share beginnings in every way: equal, extended, diverging inside, and of one token."""
    rng = random.Random(seed)
    trunk = [rng.randrange(10, VOCAB) for _ in range(400)]
    made: list[Generate] = []
    for rid in range(count):
        prompt = trunk[: rng.choice([1, 2, 31, 64, 65, 130, 257, 400])]
        if rng.random() < 0.6:
            prompt = prompt + [rng.randrange(10, VOCAB) for _ in range(rng.choice([1, 3, 40]))]
        sampling = Sampling(temperature=rng.choice([0.0, 1.2]), seed=rng.getrandbits(50), ignore_eos=rng.random() < 0.5)
        made.append(
            Generate(
                rid,
                TokensPrompt(tuple(prompt)),
                sampling,
                max_tokens=rng.choice([1, 2, 8, 30]),
                stop=rng.choice([(), ("ka",), ("to", "mi")]),
                top_logprobs=rng.choice([None, None, 1]),
                priority=rng.randrange(2),
            )
        )
    return made


def outcome(result: Result) -> Outcome:
    return tuple(result.ids), result.text, result.finish


@pytest.mark.parametrize(("architecture", "fault"), [
    *scaled([("qwen3", False), ("qwen3", True), ("qwen3_5", False), ("qwen3_5", True), ("qwen3_next", False),
             ("gemma3_text", False)], []),
    ("gpt_oss", True),
])  # fmt: skip
def test_whoever_finishes_in_a_storm_says_what_it_says_alone(
    architecture: str, fault: bool, model_folder: Callable[[str], Path]
) -> None:
    requests = storm(5, 36)
    with EngineHarness(spec(model_folder(architecture), cache_bytes=0)) as calm:
        alone = [outcome(calm.run([request])[0]) for request in requests]
    rng = random.Random(9)
    settings = {
        "max_running": 5,
        "prefill_chunk": 32,
        "max_waiting": 100,
        "cache_bytes": rng.choice([1 << 20, 1 << 26]),
    }
    with EngineHarness(spec(model_folder(architecture), **settings), wrap=Breakable) as engine:
        results: list[Result] = []
        aborted: set[int] = set()
        for request in requests:
            if rng.random() < 0.1:
                engine.command(Abort((request.rid,)))
                aborted.add(request.rid)
            results.append(engine.submit(request))
            if rng.random() < 0.4:
                seen = engine.gauges.step_seq
                engine.wait(lambda seen=seen: engine.gauges.step_seq > seen or all(each.terminals for each in results))
            if rng.random() < 0.2:
                victim = rng.choice(requests[: len(results)])
                engine.command(Abort((victim.rid,)))
                aborted.add(victim.rid)
        if fault:
            engine.loaded.model.faults = 1
        engine.wait(lambda: all(result.terminals for result in results), "every terminal event")
        assert engine.error is None
    assert [result.terminals for result in results] == [1] * len(results)
    finished = [at for at, result in enumerate(results) if result.finish is not Finish.ABORT]
    assert [outcome(results[at]) for at in finished] == [alone[at] for at in finished]
    assert set(range(len(results))) - set(finished) <= aborted
    assert len(finished) > 15
    for at in set(range(len(results))) - set(finished):
        assert alone[at][0][: len(results[at].ids)] == tuple(results[at].ids)
