"""The duty cycle: so much work, so much rest, whatever comes in between."""

import pytest

from worker.engine.scheduling.pacing import MAX_REST_S, MIN_DUTY, Rests


def test_with_a_full_duty_there_is_no_rest() -> None:
    rests = Rests()
    rests.worked(0.0, 10.0)
    assert not rests.is_on
    assert rests.left_s(10.0) == 0.0


@pytest.mark.parametrize("duty", [0.9, 0.8, 0.5, 0.25])
def test_work_and_rest_make_the_duty(duty: float) -> None:
    rests, now, worked = Rests(), 0.0, 0.0
    rests.set_duty(duty)
    for work_s in (0.01, 0.1, 0.003, 0.06) * 25:
        rests.worked(now, now + work_s)
        worked += work_s
        now += work_s
        now += rests.left_s(now)
        assert rests.left_s(now) == 0.0
    assert worked / now == pytest.approx(duty)


def test_commands_during_a_rest_do_not_shorten_it() -> None:
    rests = Rests()
    rests.set_duty(0.5)
    rests.worked(0.0, 1.0)
    rests.worked(1.2, 1.2)  # a command that cost nothing
    assert rests.left_s(1.2) == pytest.approx(0.8)


def test_a_rest_has_an_end_and_a_duty_is_never_nothing() -> None:
    rests = Rests()
    rests.set_duty(0.0)
    assert rests.duty == MIN_DUTY
    for _ in range(3):
        rests.worked(0.0, 60.0)
    assert rests.left_s(60.0) == MAX_REST_S
    rests.set_duty(1.0)
    assert rests.left_s(60.0) == 0.0
