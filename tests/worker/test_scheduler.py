"""Who runs next, and how large a prefill chunk may be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rows import row
from worker.rows import Row
from worker.scheduler import Queue


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
    assert len(queue._heap) < 100  # pyright: ignore[reportPrivateUsage]


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
    assert drained(queue) == kept
