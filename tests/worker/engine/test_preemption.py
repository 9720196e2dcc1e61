"""Memory for KV is bounded: rows wait for it, or are taken out and put back, and their tokens stay the same."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.from_worker import Finish
from protocol.stats import BLOCK
from protocol.to_worker import Generate, Sampling, TokensPrompt
from tests.support.engine import EngineHarness, spec
from tests.support.rows import row
from tests.support.scale import scaled
from worker.engine.scheduling.kv_budget import UNLIMITED_TOKENS, KvBudget, KvCost
from worker.prefix_cache.cache_and_eviction import MAX_ARRAYS


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
    [("qwen3", 0), *scaled([("qwen3_5", 1 << 30), ("qwen3", 1 << 30), ("gemma3_text", 1 << 30)], [])],
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
        results = [engine.submit_row(each) for each in rows]
        engine.wait(lambda: all(result.terminals for result in results))
        assert engine.gauges.preemptions == 0
        assert engine.ended == [each.rid for each in rows], "in order of arrival"
    assert [result.ids for result in results] == alone
    assert all(each.stats.first_token < then.stats.admitted for each, then in pairwise(rows)), "one after the other"


def test_a_row_that_made_room_waits_until_another_has_ended(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    older, newer = (requests(2, prompt, output=400)[rid] for rid, prompt in enumerate((20, 240)))
    with EngineHarness(spec(folder, cache_bytes=1 << 28)) as engine:
        limit = engine.kv_cost.bytes(2, 512) + 1
    with EngineHarness(spec(folder, cache_bytes=1 << 28, kv_bytes=limit)) as engine:
        first = engine.submit(older)
        engine.wait(lambda: first.ids, "a first token")
        second = engine.submit(newer)
        engine.wait(lambda: first.terminals and second.terminals, "both ends")
        assert engine.gauges.preemptions == 1
    assert engine.ended == [1, 2]


@given(
    st.lists(st.tuples(st.integers(1, 1200), st.integers(0, 600), st.integers(1, 600)), min_size=2, max_size=6),
    st.integers(1, 10_000),
)
def test_a_row_taken_out_is_not_admitted_beside_the_same_rows(sizes: list[tuple[int, int, int]], limit: int) -> None:
    rows = [
        row(rid, prompt=[1] * prompt, output=[1] * output, max_tokens=output + left, arrival=rid)
        for rid, (prompt, output, left) in enumerate(sizes, 1)
    ]
    budget = KvBudget(KvCost(token_bytes=1, windows=((1, 300),), fixed_bytes=5), limit)
    while (surplus := budget.surplus(rows)) is not None:
        rows.remove(surplus)
        assert not budget.admits(rows, surplus)


def test_rows_are_bounded_by_the_number_of_their_arrays_as_by_their_bytes() -> None:
    rows = [row(rid, prompt=[1], output=[1], max_tokens=9, arrival=rid) for rid in range(5)]
    budget = KvBudget(KvCost(token_bytes=1, windows=(), fixed_bytes=0, arrays=MAX_ARRAYS // 4), limit=1 << 30)

    assert budget.admits(rows[:3], rows[3])
    assert not budget.admits(rows[:4], rows[4])
    assert budget.surplus(rows[:4]) is None
    assert budget.surplus(rows) is rows[4]
    assert budget.admits([], rows[0])


def test_the_prefix_cache_gives_way_to_the_arrays_of_running_rows(model_folder: Callable[[str], Path]) -> None:
    with EngineHarness(spec(model_folder("qwen3"), cache_bytes=1 << 28)) as engine:
        cache = engine.engine.cache
        each = cache.arrays_per_row
        assert each == 2 * len(engine.loaded.model.layers)
        cache._max_arrays = 5 * each
        for request in requests(6, 20, 2):
            engine.run([request])
            assert cache.arrays <= 5 * each
        assert len(cache) > 3
        peaks: list[int] = []
        evict = cache._evict

        def watched(by: int = 0) -> None:
            evict(by)
            peaks.append(cache.arrays + cache._row_arrays)

        cache._evict = watched
        results = engine.run(requests(4, 20, 30))
        assert {result.finish for result in results} == {Finish.LENGTH}
        assert max(peaks) <= 5 * each
        engine.wait(lambda: cache._row_arrays == 0, "no rows")


@pytest.mark.soak
def test_what_a_preempted_prefill_had_computed_does_not_count_as_cached(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen3")
    older, newer = (requests(2, prompt, output)[rid] for rid, prompt, output in ((0, 230, 400), (1, 400, 4)))
    with EngineHarness(spec(folder, cache_bytes=1 << 28)) as engine:
        cost = engine.kv_cost
        cold = engine.run([newer])[0].ids
    settings = {"cache_bytes": 1 << 28, "kv_bytes": cost.bytes(2, 512) + 1, "prefill_chunk": 16}
    with EngineHarness(spec(folder, **settings)) as engine:
        running = engine.submit(older)
        # 512 tokens are near when the long prompt comes.
        engine.wait(lambda: len(running.ids) > 250, "an output near the border")
        result = engine.submit(newer)
        engine.wait(lambda: running.terminals and result.terminals, "both ends")
        assert engine.gauges.preemptions == 1
        assert engine.gauges.cache.prefix_hits > 0, "its own work was found again"
    assert result.ids == cold
    assert result.usage is not None
    assert result.usage.cached == 0


def test_the_context_is_limited_to_what_memory_holds() -> None:
    cost = KvCost(token_bytes=1000, windows=(), fixed_bytes=5000)
    assert cost.longest(5000 + 1000 * 1000) == 768
    assert cost.bytes(2, 768) == 2 * (768_000 + 5000)
    assert cost.blocks(5000 + 1000 * 1000, 64) == 768 // 64
    windowed = KvCost(token_bytes=100, windows=((50, 128),), fixed_bytes=0)
    assert windowed.bytes(1, 1024) == 100 * 1024 + 50 * 128


def test_a_model_whose_kv_does_not_grow_has_any_context_and_no_blocks() -> None:
    state = KvCost(token_bytes=0, windows=(), fixed_bytes=5000)
    windows = KvCost(token_bytes=0, windows=((50, 1024),), fixed_bytes=5000)
    assert state.longest(0) == windows.longest(5000 + 50 * 1024) == UNLIMITED_TOKENS
    assert windows.longest(5000 + 50 * 800) == 768
    assert state.blocks(1 << 30, 64) == windows.blocks(1 << 30, 64) == 0


@pytest.mark.parametrize(("architecture", "has_blocks"), [("qwen3", True), ("mamba", False)])
def test_blocks_are_told_of_models_that_have_some(
    architecture: str, has_blocks: bool, model_folder: Callable[[str], Path]
) -> None:
    with EngineHarness(spec(model_folder(architecture))) as engine:
        room, context = engine.gauges.kv_blocks, engine.loaded.max_context
    assert (0 < room < 1 << 24) is has_blocks
    assert (room * BLOCK >= context) is has_blocks
