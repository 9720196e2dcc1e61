from hypothesis import given
from hypothesis import strategies as st

from gateway.workers.supervisor.exits_and_restarts import Breaker


def crashed(times: list[float], *, is_loading: bool = False, healthy_s: float = 0.0) -> Breaker:
    breaker = Breaker()
    for time in times:
        breaker.crash(time, is_loading=is_loading, healthy_s=healthy_s)
    return breaker


def test_first_crash_costs_no_delay() -> None:
    assert crashed([0.0]).delay_s(0.99) == 0.0


def test_delay_doubles_with_full_jitter_up_to_its_cap() -> None:
    assert [crashed([0.0] * n).delay_s(1.0) for n in (2, 3, 4, 5)] == [0.5, 1.0, 2.0, 4.0]
    assert crashed([0.0] * 3).delay_s(0.25) == 0.25
    assert crashed([0.0] * 2000).delay_s(1.0) == 30.0


def test_a_healthy_minute_forgives_the_streak() -> None:
    breaker = crashed([0.0, 1.0, 2.0])
    breaker.crash(100.0, is_loading=False, healthy_s=60.0)
    assert breaker.delay_s(1.0) == 0.0


def test_breaker_opens_at_five_crashes_in_ten_minutes_and_not_before() -> None:
    assert not crashed([0.0, 1.0, 2.0, 3.0]).is_open(4.0)
    assert crashed([0.0, 1.0, 2.0, 3.0, 4.0]).is_open(4.0)
    assert not crashed([0.0, 200.0, 400.0, 500.0, 601.0]).is_open(601.0)


def test_a_worker_that_was_of_use_is_no_part_of_a_crash_loop() -> None:
    breaker = crashed([0.0, 1.0, 2.0, 3.0])
    breaker.crash(4.0, is_loading=False, healthy_s=0.5, is_useful=True)
    assert not breaker.is_open(4.0)
    assert breaker.delay_s(1.0) == 4.0, "it is still started again with care"


def test_a_crash_while_loading_counts_twice() -> None:
    assert not crashed([0.0, 1.0], is_loading=True).is_open(1.0)
    assert crashed([0.0, 1.0, 2.0], is_loading=True).is_open(2.0)


def test_reset_closes_the_breaker_and_ends_the_streak() -> None:
    breaker = crashed([0.0] * 9)
    breaker.reset()
    assert not breaker.is_open(0.0)
    assert breaker.delay_s(1.0) == 0.0


@given(st.integers(0, 5000), st.floats(0, 1, exclude_max=True))
def test_delay_is_always_between_zero_and_the_cap(crashes: int, random: float) -> None:
    assert 0.0 <= crashed([0.0] * crashes).delay_s(random) <= 30.0
