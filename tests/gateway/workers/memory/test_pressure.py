"""Memory-pressure levels of a growing worker: order and duration."""

from gateway.workers.memory.broker import MEASURES, Pressure
from gateway.workers.supervisor.state import WorkerLimits

MIB = 1 << 20
SHARE = 1000 * MIB
LIMITS = WorkerLimits()


def looks(pressure: Pressure, footprint: int, seconds: int, start: int = 0, *, is_short: bool = False) -> list[int]:
    """The level after each of so many looks, one a second."""
    levels: list[int] = []
    for second in range(start, start + seconds):
        pressure.observe(float(second), footprint, SHARE, is_short=is_short)
        levels.append(pressure.level)
    return levels


def test_caches_come_first_then_rows_and_new_requests_last() -> None:
    assert [(m.cache_part < 1, m.kv_part < 1, m.is_refusing) for m in MEASURES] == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, True, True),
    ]


def test_each_measure_gets_time_to_help() -> None:
    assert looks(Pressure(LIMITS), SHARE * 2, 8) == [1, 1, 1, 2, 2, 2, 2, 2]


def test_only_a_machine_that_is_short_of_memory_refuses_requests() -> None:
    assert looks(Pressure(LIMITS), SHARE * 2, 30)[-1] == 2
    pressure = Pressure(LIMITS)
    assert looks(pressure, SHARE // 2, 30, is_short=True)[-1] == 3
    assert pressure.measure.is_refusing
    assert looks(pressure, SHARE * 2, 1, start=30)[-1] == 2


def test_a_worker_within_its_share_is_left_alone() -> None:
    assert looks(Pressure(LIMITS), SHARE, 100) == [0] * 100
    assert looks(Pressure(LIMITS), SHARE + SHARE // 100, 100) == [0] * 100, "a page or two too many"


def test_measures_are_taken_back_one_by_one_when_all_has_been_well_for_a_while() -> None:
    pressure = Pressure(LIMITS)
    looks(pressure, SHARE * 2, 4)
    levels = looks(pressure, SHARE // 2, 70, start=4)
    assert levels[29] == 2
    assert levels[30] == 1
    assert levels[60] == 0


def test_one_relapse_starts_the_wait_anew() -> None:
    pressure = Pressure(LIMITS)
    looks(pressure, SHARE * 2, 1)
    looks(pressure, SHARE // 2, 20, start=1)
    looks(pressure, SHARE * 2, 1, start=21)
    assert looks(pressure, SHARE // 2, 25, start=22)[-1] > 0


def test_only_what_stays_far_above_its_share_in_spite_of_measures_is_hopeless() -> None:
    pressure = Pressure(LIMITS)
    looks(pressure, SHARE + 99 * MIB, 60)
    assert not pressure.is_hopeless(60.0), "within the slack"
    looks(pressure, SHARE + 101 * MIB, 10, start=60)
    assert not pressure.is_hopeless(69.0)
    assert pressure.is_hopeless(70.0)
    pressure.observe(71.0, SHARE, SHARE, is_short=False)
    assert not pressure.is_hopeless(72.0)
