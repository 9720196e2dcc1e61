"""Who runs next, and how large a prefill chunk may be."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rows import row
from worker.rows import Row
from worker.scheduler import IDLE_TICK_S, MIN_CHUNK, MIN_STALL_S, STALL_RATIO, ChunkPolicy, Queue


def drained(queue: Queue) -> list[Row]:
    return [queue.pop() for _ in range(len(queue))]


def test_equal_priorities_leave_in_order_of_arrival() -> None:
    queue, rows = Queue(), [row(rid) for rid in range(5)]
    for each in rows:
        queue.push(each)
    assert drained(queue) == rows


def test_lower_priority_numbers_leave_first() -> None:
    queue = Queue()
    late, normal, urgent = row(1, priority=5), row(2, priority=0), row(3, priority=-1)
    for each in (late, normal, urgent):
        queue.push(each)
    assert queue.rows() == [urgent, normal, late]
    assert drained(queue) == [urgent, normal, late]


def test_an_empty_queue_has_nothing_to_pop() -> None:
    with pytest.raises(IndexError):
        Queue().pop()


def test_a_removed_row_never_comes_up() -> None:
    queue, first, second = Queue(), row(1), row(2)
    queue.push(first)
    queue.push(second)
    queue.remove(first)
    assert len(queue) == 1
    assert queue.rows() == [second]
    assert drained(queue) == [second]


def test_removing_a_row_that_was_never_queued_changes_nothing() -> None:
    queue = Queue()
    queue.remove(row(1))
    assert len(queue) == 0
    queue.push(row(2))
    queue.remove(row(3))
    assert len(queue) == 1


def test_a_rid_that_was_removed_once_can_wait_again() -> None:
    queue, first, second = Queue(), row(7), row(7)
    queue.push(first)
    queue.remove(first)
    queue.push(second)
    assert len(queue) == 1
    assert queue.pop() is second
    assert len(queue) == 0


def test_a_row_pushed_back_keeps_its_place() -> None:
    queue, first, second = Queue(), row(1), row(2)
    queue.push(first)
    queue.push(second)
    queue.push(queue.pop())
    assert drained(queue) == [first, second]


def test_removed_rows_do_not_pile_up_behind_a_queue_that_does_not_move() -> None:
    queue = Queue()
    queue.push(row(0))
    for rid in range(1, 2000):
        waiting = row(rid, priority=1)
        queue.push(waiting)
        queue.remove(waiting)
    assert len(queue) == 1
    assert queue.held() < 100


@given(st.lists(st.tuples(st.integers(-2, 2), st.booleans()), max_size=40))
def test_what_leaves_is_what_was_pushed_and_not_removed_in_order(plan: list[tuple[int, bool]]) -> None:
    queue, kept = Queue(), list[Row]()
    for rid, (priority, is_removed) in enumerate(plan):
        waiting = row(rid, priority=priority)
        queue.push(waiting)
        if is_removed:
            queue.remove(waiting)
        else:
            kept.append(waiting)
        assert len(queue) == len(kept)
    kept.sort(key=lambda each: each.priority)
    assert queue.rows() == kept
    assert drained(queue) == kept


def learned(step_s: float, token_s: float, max_chunk: int = 512) -> ChunkPolicy:
    """A policy that has seen many ticks of a machine with these speeds."""
    policy = ChunkPolicy(max_chunk)
    for _ in range(60):
        policy.observe(step_s, 0, 4)
        policy.observe(step_s + 64 * token_s, 64, 4)
    return policy


def test_with_nothing_to_prefill_the_chunk_is_the_largest() -> None:
    assert learned(0.01, 0.001).chunk(0, 4) == 512


def test_before_anything_is_measured_running_streams_are_spared() -> None:
    assert ChunkPolicy(512).chunk(1, 4) == MIN_CHUNK
    assert ChunkPolicy(512).chunk(1, 0) == 512


@pytest.mark.parametrize("max_chunk", [1, 16, 64, 512])
@pytest.mark.parametrize(("prefilling", "decoding"), [(1, 0), (1, 1), (1, 16), (16, 1), (64, 0), (8, 8)])
def test_a_chunk_is_never_empty_and_never_above_its_maximum(max_chunk: int, prefilling: int, decoding: int) -> None:
    rng = random.Random(max_chunk * 1000 + prefilling * 10 + decoding)
    policy = ChunkPolicy(max_chunk)
    for _ in range(200):
        chunk = policy.chunk(prefilling, decoding)
        assert min(MIN_CHUNK, max_chunk) <= chunk <= max_chunk
        policy.observe(rng.choice([0.0, 1e-6, 0.01, 5.0]), rng.choice([0, 1, 300, 4096]), rng.choice([0, 1, 16]))


def test_a_chunk_beside_running_streams_takes_no_more_than_the_stall_it_may_cause() -> None:
    step_s, token_s = 0.02, 0.0001
    chunk = learned(step_s, token_s).chunk(1, 4)
    assert MIN_CHUNK < chunk < 512
    assert chunk * token_s <= (STALL_RATIO - 1) * step_s


def test_alone_a_chunk_lasts_no_longer_than_commands_may_wait() -> None:
    token_s = 0.001
    chunk = learned(0.02, token_s).chunk(1, 0)
    assert chunk > MIN_CHUNK
    assert chunk * token_s <= IDLE_TICK_S


def test_several_prompts_share_one_budget() -> None:
    policy = learned(0.05, 0.0001)
    assert policy.chunk(4, 16) < policy.chunk(1, 16)


def test_very_short_steps_leave_prefill_a_minimum_of_time() -> None:
    token_s = MIN_STALL_S / 256
    assert learned(1e-5, token_s).chunk(1, 1) >= 128
