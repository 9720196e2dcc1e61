"""Durations of passes: measured, predicted, recalled and dropped."""

import pytest

from protocol.timing_profile import PassKind, PassSeconds
from worker.model.pass_costs import PassCosts


def chunks(*sizes: tuple[int, float]) -> PassCosts:
    costs = PassCosts()
    for _ in range(2):
        for tokens, seconds in sizes:
            costs.observe_chunk(PassKind.ALONE, tokens, seconds)
    return costs


def steps(*sizes: tuple[int, int, float]) -> PassCosts:
    costs = PassCosts()
    for _ in range(2):
        for rows, width, seconds in sizes:
            costs.observe_step(rows, width, seconds)
    return costs


def test_a_chunk_between_two_measured_sizes_lies_on_the_line_between_them() -> None:
    costs = chunks((32, 0.004), (64, 0.006), (128, 0.014))
    assert costs.chunk(PassKind.ALONE, 16) == pytest.approx(0.003)
    assert costs.chunk(PassKind.ALONE, 96) == pytest.approx(0.010)
    assert costs.chunk(PassKind.ALONE, 256) == pytest.approx(0.030), "beyond them, the last line goes on"
    assert costs.chunk(PassKind.FUSED, 32) is None


def test_beyond_one_measured_size_a_doubling_is_assumed_to_cost_little() -> None:
    assert chunks((64, 0.008)).chunk(PassKind.ALONE, 128) == pytest.approx(0.010)
    costs = steps((4, 1, 0.010))
    assert costs.step(4, 4) == pytest.approx(0.010 * 1.25**2)


def test_a_width_that_was_not_measured_costs_as_much_more_as_the_last_doubling() -> None:
    assert steps((4, 1, 0.01), (4, 2, 0.03), (4, 4, 0.06)).step(4, 8) == pytest.approx(0.12)
    assert steps((4, 1, 0.01), (4, 2, 0.03)).step(4, 4) == pytest.approx(0.0375), "one token has other kernels"
    assert steps((4, 2, 0.03)).step(4, 2) is None, "nothing to compare with"


def test_a_number_of_rows_that_was_not_measured_is_between_as_long_and_proportionally_longer() -> None:
    costs = steps((4, 1, 0.02), (16, 1, 0.05))
    assert costs.scaled_step(4, 1) == 0.02
    assert 0.005 < costs.scaled_step(1, 1) < 0.02
    assert 0.05 < costs.scaled_step(32, 1) < 0.1
    assert costs.scaled_step(16, 4) == 0.0
    assert costs.step(32, 1) is None


def test_the_first_pass_of_a_size_may_have_compiled_kernels() -> None:
    costs = chunks((32, 0.004))
    costs.observe_chunk(PassKind.ALONE, 64, 3.0)
    assert (costs.chunk(PassKind.ALONE, 64) or 0) < 0.01
    costs.observe_chunk(PassKind.ALONE, 64, 0.006)
    assert costs.chunk(PassKind.ALONE, 64) == pytest.approx(0.006)
    costs.observe_chunk(PassKind.ALONE, 64, 3.0)
    assert costs.chunk(PassKind.ALONE, 64) == pytest.approx(0.006), "nor does a single slow one count"


def test_a_size_that_was_not_used_for_long_is_dropped() -> None:
    costs = steps((4, 1, 0.01), (4, 8, 1.0))
    for _ in range(600):
        costs.observe_step(4, 1, 0.01)
    assert not costs.has_step(4, 8)
    assert costs.has_step(4, 1)


def test_each_band_of_contexts_has_its_own_times_and_chunks_begin_with_those_of_the_nearest() -> None:
    costs = chunks((64, 0.01))
    costs.band = 2
    assert costs.chunk(PassKind.ALONE, 64) == pytest.approx(0.01)
    for _ in range(2):
        costs.observe_chunk(PassKind.ALONE, 64, 0.05)
    assert costs.chunk(PassKind.ALONE, 64) == pytest.approx(0.05)
    costs.band = 0
    assert costs.chunk(PassKind.ALONE, 64) == pytest.approx(0.01)


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_times_of_an_earlier_start_that_lie_do_not_last(factor: float) -> None:
    costs = PassCosts([PassSeconds(0, PassKind.ALONE, 0, tokens, factor * tokens / 1e4) for tokens in (8, 64, 512)])
    assert costs.chunk(PassKind.ALONE, 512) == pytest.approx(factor * 0.0512)
    for _ in range(4):
        costs.observe_chunk(PassKind.ALONE, 64, 0.0064)
    assert costs.chunk(PassKind.ALONE, 512) == pytest.approx(0.0064 * 1.25**3, rel=0.01), "one size speaks for all"


def test_one_pass_that_compiled_kernels_does_not_speak_against_an_earlier_start() -> None:
    kept = [PassSeconds(0, PassKind.STEP, 1, 1, 0.01), PassSeconds(0, PassKind.STEP, 1, 8, 0.012)]
    costs = PassCosts([*kept, PassSeconds(0, PassKind.STEP, 3, 8, 9.0), PassSeconds(0, PassKind.STEP, 1, 7, 9.0)])
    costs.observe_step(1, 8, 1.0)
    assert costs.step(1, 8) == pytest.approx(0.012)
    assert [each.size for each in costs.records()] == [1, 8], "what is no size of ours is not taken"


def test_what_was_measured_once_is_kept_only_if_nothing_else_is_known() -> None:
    costs = steps((2, 1, 0.01))
    costs.observe_step(2, 4, 0.5)
    costs.observe_step(8, 1, 0.02)
    assert [(each.rows, each.size) for each in costs.records()] == [(2, 1), (8, 1)]
