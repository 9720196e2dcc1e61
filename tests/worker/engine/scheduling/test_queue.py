"""The order in which waiting rows run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.rows import row
from worker.engine.row import Row
from worker.engine.scheduling.queue import Queue


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
    queue.put_back([queue.pop()])
    assert drained(queue) == [first, second]


def test_removed_rows_do_not_pile_up_behind_a_queue_that_does_not_move() -> None:
    queue = Queue()
    queue.push(row(0))
    for rid in range(1, 2000):
        waiting = row(rid, priority=1)
        queue.push(waiting)
        queue.remove(waiting)
    assert len(queue) == 1
    assert queue._levels.keys() == {0}  # pyright: ignore[reportPrivateUsage]


def named(queue: Queue, names: str) -> list[Row]:
    """Push a row for each letter, its tenant."""
    rows = [row(rid, tenant=name) for rid, name in enumerate(names)]
    for each in rows:
        queue.push(each)
    return rows


def order(rows: list[Row]) -> str:
    return "".join(each.tenant for each in rows)


def test_tenants_of_equal_priority_take_turns_and_each_keeps_its_order() -> None:
    queue = Queue()
    rows = named(queue, "aaaaabbc")
    left = drained(queue)

    assert order(left) == "abcabaaa"
    for tenant in "abc":
        own = [each for each in rows if each.tenant == tenant]
        assert [each for each in left if each.tenant == tenant] == own


def test_a_tenant_that_comes_late_waits_for_one_row_of_each_other() -> None:
    queue = Queue()
    named(queue, "a" * 1000 + "b" * 1000)
    for _ in range(10):
        queue.pop()
    late = row(9999, tenant="c")
    queue.push(late)

    assert late in [queue.pop() for _ in range(3)]


def test_a_turn_goes_by_priority_first() -> None:
    queue = Queue()
    named(queue, "aab")
    urgent = row(9, priority=-1, tenant="a")
    queue.push(urgent)
    assert queue.pop() is urgent
    assert order(drained(queue)) == "aba"


def test_a_tenant_whose_rows_were_removed_loses_no_turn_and_holds_up_nobody() -> None:
    queue = Queue()
    rows = named(queue, "aaabb")
    for each in rows[:2]:
        queue.remove(each)
    assert order(drained(queue)) == "abb"
    rows = named(queue, "aab")
    queue.remove(rows[2])
    assert order(drained(queue)) == "aa"


def test_rows_that_were_put_back_come_up_as_if_they_had_not_been_popped() -> None:
    queue = Queue()
    named(queue, "aaabbc")
    popped = [queue.pop() for _ in range(4)]
    assert order(popped) == "abca"
    queue.put_back([popped[0], popped[3]])

    left = drained(queue)
    assert left[0] is popped[0]
    assert order(left) == "abaa"
    assert [each.rid for each in left if each.tenant == "a"] == [0, 1, 2]


def test_rows_that_have_run_come_before_all_that_have_not() -> None:
    queue = Queue()
    named(queue, "aab")
    early, late = row(11, tenant="b"), row(12, tenant="a")
    early.stats.admitted, late.stats.admitted = 1.0, 2.0
    from_another_worker = row(13, tenant="b", output=[1])
    for each in (from_another_worker, late, early):
        queue.push(each)

    assert [queue.pop() for _ in range(3)] == [early, late, from_another_worker]
    assert order(drained(queue)) == "aba"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.sampled_from(["push", "pop", "back", "remove"])))
)
def test_no_row_is_lost_or_comes_twice_whatever_is_done(plan: list[tuple[str, int, str]]) -> None:
    queue, waiting = Queue(), list[Row]()
    for rid, (tenant, priority, what) in enumerate(plan):
        if what == "push":
            waiting.append(row(rid, tenant=tenant, priority=priority))
            queue.push(waiting[-1])
        elif waiting and what == "remove":
            queue.remove(waiting.pop(len(waiting) // 2))
        elif waiting:
            popped = queue.pop()
            assert popped.priority == min(each.priority for each in waiting)
            if what == "back":
                queue.put_back([popped])
                assert queue.pop() is popped
            waiting.remove(popped)
        assert len(queue) == len(waiting)
    assert sorted(each.rid for each in drained(queue)) == sorted(each.rid for each in waiting)


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
