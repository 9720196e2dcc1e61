"""Memory for KV is bounded: rows wait for it, or are taken out and put back, and their tokens stay the same."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from protocol.messages import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from worker.kv_budget import KvCost


def requests(count: int, prompt: int, output: int) -> list[Generate]:
    return [
        Generate(
            rid,
            TokensPrompt(tuple(20 + (rid * 31 + at * 7) % 400 for at in range(prompt))),
            Sampling(temperature=0.8 if rid % 2 else 0.0, seed=rid, ignore_eos=True),
            max_tokens=output,
        )
        for rid in range(1, count + 1)
    ]


@pytest.mark.parametrize(
    ("architecture", "cache_bytes"),
    [("qwen3", 0), ("qwen3", 1 << 30), ("gemma3_text", 1 << 30), ("qwen3_5", 1 << 30)],
)
def test_preempted_rows_end_with_the_tokens_they_would_have_had(
    architecture: str, cache_bytes: int, model_folder: Callable[[str], Path]
) -> None:
    # Admission counts on 256 tokens of output; these rows grow past a step of 256 beyond that.
    batch = requests(3, prompt=240, output=290)
    folder = model_folder(architecture)
    with EngineHarness(spec(folder, cache_bytes=cache_bytes)) as engine:
        alone = [engine.run([request])[0].ids for request in batch]
        cost = engine.kv_cost
    with EngineHarness(spec(folder, cache_bytes=cache_bytes, kv_bytes=cost.bytes(3, 512) + 1)) as engine:
        results = engine.run(batch)
        assert engine.gauges.preemptions > 0
    assert [result.ids for result in results] == alone


def test_rows_that_do_not_fit_together_wait_for_each_other(model_folder: Callable[[str], Path]) -> None:
    batch = requests(3, prompt=100, output=30)
    with EngineHarness(spec(model_folder("qwen3"))) as engine:
        cost = engine.kv_cost
        alone = [engine.run([request])[0].ids for request in batch]
    with EngineHarness(spec(model_folder("qwen3"), kv_bytes=cost.bytes(1, 256))) as engine:
        # All are ready before the first is sent: how long making one takes must not matter.
        rows = [engine.intake.row(request, 0.0) for request in batch]
        results = [engine.submit_row(row) for row in rows]
        engine.wait(lambda: all(result.terminals for result in results))
        assert engine.gauges.preemptions == 0
        assert engine.ended == [row.rid for row in rows], "in order of arrival"
    assert [result.ids for result in results] == alone
    assert all(row.first_token < then.admitted for row, then in pairwise(rows)), "one after the other"


def test_the_context_is_limited_to_what_memory_holds() -> None:
    cost = KvCost(token_bytes=1000, windows=(), fixed_bytes=5000)
    assert cost.longest(5000 + 1000 * 1000) == 768
    assert cost.bytes(2, 768) == 2 * (768_000 + 5000)
    windowed = KvCost(token_bytes=100, windows=((50, 128),), fixed_bytes=0)
    assert windowed.bytes(1, 1024) == 100 * 1024 + 50 * 128
