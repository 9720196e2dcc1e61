"""The clock of a watch of heartbeats, which stops while its own thread does not run."""

from protocol.run_clock import RunClock


def test_a_turn_that_the_machine_did_not_run_counts_as_one_turn() -> None:
    at = 100.0
    clock = RunClock(1.0, lambda: at)
    for _ in range(4):
        at += 0.25
        clock.look()
    assert clock.now == 1.0
    at += 3600.0
    assert clock.look() == 2.0
    at += 0.25
    assert clock.look() == 2.25


def test_a_thread_that_seldom_runs_still_comes_to_an_end_of_its_patience() -> None:
    at = 0.0
    clock = RunClock(1.0, lambda: at)
    for _ in range(6):
        at += 10.0
        clock.look()
    assert clock.now == 6.0
