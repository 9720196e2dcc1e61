"""The duty cycle: so much work, so much rest, whatever comes in between."""

import pytest

from worker.engine.scheduling.pacing import MAX_REST_S, MIN_DUTY_CYCLE, DutyCycle


def test_with_a_full_duty_there_is_no_rest() -> None:
    cycle = DutyCycle()
    cycle.worked(0.0, 10.0)
    assert not cycle.is_on
    assert cycle.left_s(10.0) == 0.0


@pytest.mark.parametrize("ratio", [0.9, 0.8, 0.5, 0.25])
def test_work_and_rest_keep_the_ratio(ratio: float) -> None:
    cycle, now, worked = DutyCycle(), 0.0, 0.0
    cycle.set_ratio(ratio)
    for work_s in (0.01, 0.1, 0.003, 0.06) * 25:
        cycle.worked(now, now + work_s)
        worked += work_s
        now += work_s
        now += cycle.left_s(now)
        assert cycle.left_s(now) == 0.0
    assert worked / now == pytest.approx(ratio)


def test_commands_during_a_rest_do_not_shorten_it() -> None:
    cycle = DutyCycle()
    cycle.set_ratio(0.5)
    cycle.worked(0.0, 1.0)
    cycle.worked(1.2, 1.2)  # a command that cost nothing
    assert cycle.left_s(1.2) == pytest.approx(0.8)


def test_a_rest_has_an_end_and_a_duty_is_never_nothing() -> None:
    cycle = DutyCycle()
    cycle.set_ratio(0.0)
    assert cycle.ratio == MIN_DUTY_CYCLE
    for _ in range(3):
        cycle.worked(0.0, 60.0)
    assert cycle.left_s(60.0) == MAX_REST_S
    cycle.set_ratio(1.0)
    assert cycle.left_s(60.0) == 0.0
