"""Prompts beside streams that draft: step times that are true by rows and width, and a stall bounded per token."""

import pytest

from protocol.timing_profile import PassKind
from tests.worker.engine.scheduling.modelled import Machine, at, plain_s, traffic
from tests.worker.engine.scheduling.test_chunking import fused, separate, step
from worker.engine.scheduling.pacing import CROWD, MIN_CHUNK, STALL_BLOCKS, STALL_RATIO, ChunkPolicy
from worker.model.pass_costs import PassCosts
from worker.speculation.policy import may_pay

# The first tokens of drafting clients may come this many times as late as without drafts. They have their answers
# sooner and so ask more often, which is why it is not 1; without any drafts beside prompts it would be as much.
TTFT_FACTOR = 1.4
PLAIN_S = 0.02
BLOCK_S = 0.04
TOKEN_S = 0.0001
# Of two prompts beside four streams.
CROWDED = 1 + CROWD / 4


def drafting(tokens: int, block: float = BLOCK_S) -> ChunkPolicy:
    """A policy that knows plain steps of four rows, and whose newest step was a block of so many tokens a row."""
    policy = ChunkPolicy(1 << 16)
    for _ in range(8):
        step(policy, PLAIN_S)
        for chunk in (1 << size for size in range(5, 14)):
            separate(policy, chunk * TOKEN_S, chunk)
            step(policy, block, width=8, each=tokens)
            fused(policy, block + chunk * TOKEN_S, chunk, width=8, each=tokens)
        step(policy, block, width=8, each=tokens)
    return policy


def stall_s(policy: ChunkPolicy, prefilling: int) -> float:
    """What a chunk of long prompts adds to the next tick of four rows."""
    return policy.chunk(prefilling, 4).tokens * prefilling * TOKEN_S


@pytest.mark.parametrize("clients", [8, 16, 32])
def test_prompts_beside_drafting_clients_wait_about_as_long_as_without_drafts(clients: int) -> None:
    off = Machine(drafts=False).serve(traffic(600), clients)
    on = Machine(drafts=True).serve(traffic(600), clients)
    for part in (0.5, 0.9):
        assert at(on.ttft, part) <= TTFT_FACTOR * at(off.ttft, part)
    assert on.tokens / on.seconds > 1.2 * off.tokens / off.seconds, "nor is it bought by what drafts win"
    assert at(on.token_gaps, 0.5) < at(off.token_gaps, 0.5)


def test_a_block_may_be_held_up_for_the_plain_steps_that_its_tokens_would_take() -> None:
    one_s = (STALL_RATIO - 1) * BLOCK_S
    policy = drafting(tokens=3)
    assert policy.costs.gain(4, 8) == pytest.approx(1.5)
    assert policy._stall_s(2, 4) == pytest.approx(1.5 * one_s * CROWDED)
    lost = drafting(tokens=1)
    assert lost._stall_s(2, 4) == pytest.approx(0.5 * one_s * CROWDED), "one that gives no more counts as a plain step"


@pytest.mark.parametrize("tokens", [4, 8])
def test_one_event_of_a_stream_is_held_up_for_a_bounded_number_of_blocks(tokens: int) -> None:
    one_s, policy = (STALL_RATIO - 1) * BLOCK_S, drafting(tokens)
    assert 0.2 * one_s < stall_s(policy, 1) <= one_s, "by one long prompt as without drafts"
    assert policy._stall_s(1, 4) == pytest.approx(one_s)
    assert policy._stall_s(2, 4) == pytest.approx(STALL_BLOCKS * one_s * CROWDED)
    assert stall_s(policy, 2) <= STALL_BLOCKS * one_s * CROWDED


@pytest.mark.parametrize("drafts", [False, True])
def test_a_batch_that_fills_up_while_prompts_keep_coming_knows_what_its_steps_take(drafts: bool) -> None:
    machine = Machine(drafts=drafts)
    machine.serve(traffic(4), 1)
    machine.serve(traffic(200, seed=4), 16)
    costs = machine.policy.costs
    for rows in (1, 4, 8):
        seconds = costs.step(rows, 1)
        assert seconds is not None
        assert 0.9 * plain_s(0.7 * rows) <= seconds <= 1.1 * plain_s(1.45 * rows)


def test_blocks_alone_keep_the_limit_and_no_newest_step_decides_it() -> None:
    policy = drafting(tokens=2)
    before = policy.chunk(1, 4)
    for _ in range(100):
        step(policy, 0.002, rows=1)
        step(policy, BLOCK_S, width=8, each=2)
    assert policy.chunk(1, 4) == before
    assert before.tokens > MIN_CHUNK


def chunk_times(costs: PassCosts) -> dict[int, float]:
    return {each.size: round(each.seconds, 6) for each in costs.records() if each.kind is PassKind.FUSED}


def test_a_chunk_is_measured_against_a_step_of_the_same_rows_and_width() -> None:
    policy = ChunkPolicy(512)
    for _ in range(2):
        step(policy, 0.02)
        step(policy, 0.05, width=8)
        step(policy, 0.09, rows=16, width=8)
    for _ in range(2):
        fused(policy, 0.06, 32, width=8)
        fused(policy, 0.11, 64, rows=16, width=8)
        fused(policy, 0.06, 128)
    assert chunk_times(policy.costs) == {32: 0.01, 64: 0.02, 128: 0.04}


def test_beside_a_step_that_is_unknown_nothing_is_said_of_the_chunk() -> None:
    policy = ChunkPolicy(512)
    step(policy, 0.02)
    for _ in range(3):
        fused(policy, 0.08, 64, width=8)
        fused(policy, 0.08, 64, rows=16)
    assert chunk_times(policy.costs) == {}


def test_a_plain_step_with_a_known_chunk_tells_drafts_what_it_took() -> None:
    policy = ChunkPolicy(512)
    step(policy, 0.02)
    for _ in range(2):
        fused(policy, 0.03, 64)
    assert not may_pay(policy.costs, 16)
    fused(policy, 0.06, 64, rows=16)
    assert policy.costs.step(16, 1) == pytest.approx(0.05)
    assert may_pay(policy.costs, 16)
    fused(policy, 0.011, 64, rows=1)
    assert policy.costs.step(1, 1) is None, "the small rest of a long pass says nothing"


def test_while_prompts_keep_coming_a_step_is_now_and_then_measured_without_a_chunk() -> None:
    policy, measured = drafting(tokens=2), 0
    for _ in range(400):
        if policy.chunk(1, 4).is_fused:
            fused(policy, BLOCK_S + 64 * TOKEN_S, 64, width=8, each=2)
        else:
            measured += 1
            step(policy, BLOCK_S, width=8, each=2)
            separate(policy, 64 * TOKEN_S, 64)
    assert 3 <= measured <= 40
