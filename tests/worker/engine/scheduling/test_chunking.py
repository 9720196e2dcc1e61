"""Prefill chunks: a bounded stall for running streams, and progress for the prompt."""

import random

import pytest

from protocol.timing_profile import PassKind, PassSeconds
from worker.engine.scheduling.pacing import (
    ENOUGH,
    FIRST_CHUNK,
    GENTLE_RATIO,
    IDLE_TICK_S,
    MIN_CHUNK,
    MIN_STALL_S,
    SHORT_PROMPT,
    SHORT_PROMPT_FACTOR,
    STALL_RATIO,
    WATCHDOG,
    WATCHDOG_LEAST,
    ChunkPolicy,
    PaceLimits,
    PassTime,
)
from worker.model.pass_costs import PassCosts


def step(policy: ChunkPolicy, seconds: float, rows: int = 4, width: int = 1, each: int = 1) -> None:
    """A step that gives each row so many tokens."""
    policy.observe(PassTime(seconds, rows, width, each * rows))


def fused(policy: ChunkPolicy, seconds: float, chunk: int, rows: int = 4, width: int = 1, each: int = 1) -> None:
    policy.observe(PassTime(seconds, rows, width, each * rows, chunk))


def separate(policy: ChunkPolicy, seconds: float, chunk: int) -> None:
    policy.observe(PassTime(seconds, prompted=chunk))


def learned(step_s: float, token_s: float, max_chunk: int = 512) -> ChunkPolicy:
    """A policy that has seen many ticks of a machine with these speeds."""
    policy = ChunkPolicy(max_chunk)
    for _ in range(60):
        step(policy, step_s)
        for chunk in (32, 64, 128):
            separate(policy, chunk * token_s, chunk)
    return policy


def test_with_nothing_to_prefill_the_chunk_is_the_largest() -> None:
    assert learned(0.01, 0.001).chunk(0, 4).tokens == 512


def test_before_anything_is_measured_running_streams_are_spared() -> None:
    assert ChunkPolicy(512).chunk(1, 4).tokens == FIRST_CHUNK
    assert ChunkPolicy(512).chunk(1, 0).tokens == 512


@pytest.mark.parametrize("max_chunk", [1, 16, 64, 512])
@pytest.mark.parametrize(("prefilling", "decoding"), [(1, 0), (1, 1), (1, 16), (16, 1), (64, 0), (8, 8)])
def test_a_chunk_is_never_empty_and_never_above_its_maximum(max_chunk: int, prefilling: int, decoding: int) -> None:
    rng = random.Random(max_chunk * 1000 + prefilling * 10 + decoding)
    policy = ChunkPolicy(max_chunk)
    for _ in range(200):
        chunk = policy.chunk(prefilling, decoding).tokens
        assert min(MIN_CHUNK, max_chunk) <= chunk <= max_chunk
        rows, prompted = rng.choice([0, 1, 16]), rng.choice([1, 300, 4096])
        prompted *= rows == 0 or rng.random() < 0.5
        policy.observe(PassTime(rng.choice([0.0, 1e-6, 0.01, 5.0]), rows, rng.choice([1, 2, 16]), 2 * rows, prompted))


def test_a_chunk_beside_running_streams_takes_no_more_than_the_stall_it_may_cause() -> None:
    step_s, token_s = 0.02, 0.0001
    chunk = learned(step_s, token_s).chunk(1, 4).tokens
    assert MIN_CHUNK < chunk < 512
    assert chunk * token_s <= (STALL_RATIO - 1) * step_s


def test_alone_a_chunk_lasts_no_longer_than_commands_may_wait() -> None:
    token_s = 0.001
    chunk = learned(0.02, token_s).chunk(1, 0).tokens
    assert chunk > MIN_CHUNK
    assert chunk * token_s <= 1.25 * IDLE_TICK_S  # what is hoped for before it is known


def test_several_prompts_share_one_budget() -> None:
    policy = learned(0.05, 0.0001)
    assert policy.chunk(4, 16).tokens < policy.chunk(1, 16).tokens


def test_very_short_steps_leave_prefill_a_minimum_of_time() -> None:
    token_s = MIN_STALL_S / 256
    assert learned(1e-5, token_s).chunk(1, 1).tokens >= 128


def settle(policy: ChunkPolicy, step_s: float, chunk_s: float, token_s: float) -> int:
    """Run a machine where a chunk costs a fixed time and some for each token; the chunk it ends with."""
    chunk = 0
    for _ in range(40):
        step(policy, step_s)
        chunk = policy.chunk(1, 4).tokens
        separate(policy, chunk_s + chunk * token_s, chunk)
    return chunk


def test_where_a_chunk_costs_the_same_whatever_its_size_the_large_one_is_found() -> None:
    step_s, chunk_s, token_s = 0.010, 0.006, 0.00001
    chunk = settle(ChunkPolicy(512), step_s, chunk_s, token_s)
    assert chunk == 512
    assert chunk_s + chunk * token_s <= (STALL_RATIO - 1) * step_s


def test_where_tokens_cost_the_chunk_settles_within_the_stall() -> None:
    step_s, token_s = 0.006, 0.0003
    chunk = settle(ChunkPolicy(512), step_s, 0.001, token_s)
    assert chunk >= MIN_CHUNK
    assert 0.001 + chunk * token_s <= 1.25 * (STALL_RATIO - 1) * step_s


def test_one_chunk_that_compiled_kernels_does_not_make_its_size_slow() -> None:
    step_s, chunk_s, token_s, compile_s = 0.010, 0.008, 0.00002, 0.08
    policy, compiled, chunks = ChunkPolicy(512), set[int](), list[int]()
    for _ in range(40):
        step(policy, step_s)
        chunk = policy.chunk(1, 4).tokens
        seconds = chunk_s + chunk * token_s + (0 if chunk in compiled else compile_s)
        compiled.add(chunk)
        fused(policy, step_s + seconds, chunk)
        chunks.append(chunk)
    assert min(chunks[20:]) >= 128


def test_where_the_least_chunk_takes_too_long_one_that_takes_little_more_is_taken() -> None:
    chunk = settle(ChunkPolicy(512), step_s=0.010, chunk_s=0.02, token_s=0.00002)
    assert 64 <= chunk <= 512
    assert chunk * 0.00002 <= 0.3 * 0.02


def test_a_growing_context_makes_chunks_smaller() -> None:
    policy = ChunkPolicy(512)
    before = settle(policy, 0.02, 0.001, 0.0001)
    assert settle(policy, 0.02, 0.001, 0.0004) < before


def test_a_short_prompt_may_stall_longer_once() -> None:
    policy = learned(0.02, 0.0003)
    long, short = policy.chunk(1, 4, longest=5000).tokens, policy.chunk(1, 4, longest=SHORT_PROMPT).tokens
    assert long < short <= long * 2 * SHORT_PROMPT_FACTOR


def test_a_first_chunk_that_compiled_kernels_is_soon_forgotten() -> None:
    policy = ChunkPolicy(512)
    separate(policy, 12.0, 256)
    for _ in range(60):
        step(policy, 0.005, rows=1)
        chunk = policy.chunk(1, 0).tokens
        separate(policy, 0.004 + chunk * 0.00002, chunk)
    assert policy.chunk(1, 0).tokens == 512


def test_alone_a_short_prompt_is_not_cut_and_several_share_shorter_ticks() -> None:
    policy = learned(0.02, 0.002)
    assert policy.chunk(1, 0, longest=SHORT_PROMPT).tokens > policy.chunk(1, 0).tokens
    assert 2 * policy.chunk(2, 0).tokens <= policy.chunk(1, 0).tokens


def test_a_fixed_policy_learns_nothing_from_time() -> None:
    policy = ChunkPolicy(512, is_fixed=True)
    for tick_s in (0.001, 5.0):
        for decoding in (0, 4):
            policy.observe(PassTime(tick_s, decoding, prompted=512))
            assert policy.chunk(3, decoding).tokens == 512


def seasoned(fused_s: float, separate_s: float, step_s: float = 0.02) -> ChunkPolicy:
    """A policy that has seen chunks of 128 tokens add so much to a step, in one forward pass and in their own."""
    policy = ChunkPolicy(512)
    for _ in range(8):
        step(policy, step_s)
        fused(policy, step_s + fused_s, 128)
        separate(policy, separate_s, 128)
    return policy


def test_chunks_are_fused_into_the_step_where_that_is_quicker_and_else_are_separate() -> None:
    assert seasoned(fused_s=0.005, separate_s=0.02).chunk(1, 4).is_fused
    assert not seasoned(fused_s=0.02, separate_s=0.005).chunk(1, 4).is_fused
    assert seasoned(fused_s=0.01, separate_s=0.0098).chunk(1, 4).is_fused, "one pass is left only for a gain"
    assert not ChunkPolicy(512, can_fuse=False).chunk(1, 4).is_fused
    assert not seasoned(0.005, 0.02).chunk(1, 0).is_fused, "there is no step"


def test_a_way_that_was_slower_is_tried_again() -> None:
    policy = seasoned(fused_s=0.02, separate_s=0.005)
    for _ in range(300):
        step(policy, 0.02)
        separate(policy, 0.005, 128)
    assert policy.chunk(1, 4).is_fused


def test_where_enough_tokens_cost_little_a_long_prompt_stalls_streams_little() -> None:
    step_s, chunk_s, token_s = 0.012, 0.001, 0.00002
    policy, chunk = ChunkPolicy(512), 0
    for _ in range(40):
        step(policy, step_s)
        chunk = policy.chunk(1, 4).tokens
        fused(policy, step_s + chunk_s + chunk * token_s, chunk)
    assert chunk >= ENOUGH
    assert chunk_s + chunk * token_s <= (GENTLE_RATIO - 1) * step_s * 1.25


def recalled(chunk_s: float, step_s: float = 0.02) -> ChunkPolicy:
    """A policy that has the times of an earlier start: a chunk of 512 tokens has added so much to a step."""
    kept = [PassSeconds(0, PassKind.STEP, 4, 1, step_s)]
    for kind in (PassKind.FUSED, PassKind.ALONE):
        kept += [PassSeconds(0, kind, 0, tokens, chunk_s * tokens / 512) for tokens in (32, 128, 512)]
    return ChunkPolicy(512, PassCosts(kept))


def test_with_times_of_an_earlier_start_the_first_prompt_has_the_right_chunk_at_once() -> None:
    assert recalled(chunk_s=0.007).chunk(1, 4).tokens == 512
    assert recalled(chunk_s=0.100).chunk(1, 4).tokens == 64
    assert recalled(chunk_s=2.0).chunk(1, 0).tokens == 128, "and no first tick of seconds"
    assert ChunkPolicy(512).chunk(1, 4).tokens == FIRST_CHUNK


@pytest.mark.parametrize("claimed_s", [1e-6, 50.0])
def test_times_that_lie_are_found_out_within_a_few_chunks(claimed_s: float) -> None:
    policy, honest = recalled(chunk_s=claimed_s), ChunkPolicy(512)
    assert settle(policy, 0.02, 0.001, 0.0001) == settle(honest, 0.02, 0.001, 0.0001)


def test_a_first_chunk_that_compiled_kernels_does_not_cost_the_times_of_an_earlier_start() -> None:
    policy = recalled(chunk_s=0.007)
    step(policy, 0.02)
    fused(policy, 3.0, 512)
    for _ in range(4):
        step(policy, 0.02)
        fused(policy, 0.027, policy.chunk(1, 4).tokens)
    assert policy.chunk(1, 4).tokens >= 256


def test_each_band_of_contexts_has_times_of_its_own() -> None:
    policy = ChunkPolicy(512)
    for _ in range(30):
        step(policy, 0.02)
        chunk = policy.chunk(1, 4, 50_000, context=1000).tokens
        fused(policy, 0.021 + chunk * 0.00001, chunk)
    assert policy.chunk(1, 4, 50_000, context=20_000).tokens == 512, "nothing else is known there yet"
    for _ in range(60):
        step(policy, 0.02)
        chunk = policy.chunk(1, 4, 50_000, context=20_000).tokens
        fused(policy, 0.021 + chunk * 0.0005, chunk)
    assert policy.chunk(1, 4, 50_000, context=20_000).tokens <= 32
    assert policy.chunk(1, 4, 50_000, context=1000).tokens == 512, "the next prompt begins where the first one did"


@pytest.mark.parametrize("is_fixed", [False, True])
def test_with_a_watchdog_a_chunk_gets_smaller_as_its_context_grows(is_fixed: bool) -> None:
    policy = ChunkPolicy(2048, has_watchdog=True, is_fixed=is_fixed)
    sizes = {context: policy.chunk(1, 0, context=context).tokens for context in (0, 8192, 32_768, 65_536, 131_072)}
    assert sizes == {0: 2048, 8192: 2048, 32_768: 1024, 65_536: 512, 131_072: 256}
    for context in range(1, 2_000_000, 9973):
        tokens = policy.chunk(1, 0, context=context).tokens
        assert tokens == WATCHDOG_LEAST or tokens * context <= WATCHDOG
    assert policy.chunk(4, 0, context=65_536).tokens == 128, "rows share one dispatch"
    assert policy.chunk(64, 0, context=1 << 20).tokens == MIN_CHUNK
    assert ChunkPolicy(2048).chunk(1, 0, context=1 << 20).tokens == 2048


def test_a_desktop_has_short_ticks_and_small_chunks() -> None:
    token_s = 0.0005
    policy = learned(0.02, token_s)
    full = policy.chunk(1, 0).tokens
    policy.pace = PaceLimits(tick_s=0.06, tokens=256)
    short = policy.chunk(1, 0).tokens
    assert short < full
    assert short * token_s <= 1.25 * 0.06
    policy.pace = PaceLimits(tokens=64)
    assert policy.chunk(1, 0).tokens == policy.chunk(1, 0, longest=SHORT_PROMPT).tokens == 64
    policy.pace = PaceLimits()
    assert policy.chunk(1, 0).tokens == full


def test_a_fixed_policy_has_the_same_chunks_beside_a_display() -> None:
    policy = ChunkPolicy(512, is_fixed=True)
    policy.pace = PaceLimits(0.06, 64)
    assert policy.chunk(1, 0).tokens == 512
