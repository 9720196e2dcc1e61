"""The width of a step follows what steps of that width were measured to take."""

from collections.abc import Callable

import pytest

from worker.speculation.policy.draft_width import WIDTHS, FasterOfTwo, StepCosts

SURE = [1.0] * 15


def run(cost: Callable[[int], float], rows: int = 1, odds: float = 0.95, steps: int = 2000) -> tuple[float, StepCosts]:
    """Tokens a second ÷ those of plain steps, on a device on which a step of so many tokens takes so long."""
    costs, width = StepCosts(), 1
    chances = [[odds ** (at + 1) for at in range(15)]] * rows
    tokens, seconds = 0.0, 0.0
    for _ in range(steps):
        tokens += rows + sum(sum(each[: width - 1]) for each in chances)
        seconds += cost(rows * width)
        costs.observe(rows, width, cost(rows * width))
        width = costs.width(rows, chances)
    return tokens / seconds / (rows / cost(rows)), costs


def flat(tokens: int) -> float:
    return 0.01


def linear(tokens: int) -> float:
    return 0.01 * tokens


def matrix(tokens: int) -> float:
    """Flat while reading the weights takes longest, then by arithmetic, as on a GPU."""
    return max(0.01, 0.01 * tokens / 32)


def cliff(tokens: int) -> float:
    """A second token doubles the time, and more cost little, as where the kernel for one is another."""
    return 0.01 if tokens == 1 else 0.02 + 0.0001 * tokens


def test_where_more_tokens_cost_nothing_more_the_widest_step_is_taken() -> None:
    gain, costs = run(flat)
    assert costs.width(1, [[0.95 ** (at + 1) for at in range(15)]]) == WIDTHS[-1]
    assert gain > 10


def test_a_dear_second_token_does_not_hide_that_more_are_cheap() -> None:
    assert run(cliff)[0] > 4


@pytest.mark.parametrize("rows", [1, 4, 8, 32])
@pytest.mark.parametrize("odds", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("cost", [flat, linear, matrix, cliff])
def test_drafts_are_never_a_loss(cost: Callable[[int], float], odds: float, rows: int) -> None:
    assert run(cost, rows, odds)[0] >= 0.98


def test_nothing_is_tried_before_a_plain_step_was_measured() -> None:
    costs = StepCosts()
    assert costs.width(1, [SURE]) == 1
    assert not costs.may_pay(1)
    costs.observe(1, 1, 0.01)
    assert costs.may_pay(1)
    assert costs.width(1, [SURE]) == 2, "one doubling at a time"


def test_what_was_once_slow_is_tried_again() -> None:
    costs = StepCosts()
    costs.observe(1, 1, 0.01)
    costs.observe(1, 2, 1.0)
    assert costs.width(1, [SURE]) == 1
    tried = 0
    for _ in range(200):
        costs.observe(1, 1, 0.01)
        tried += costs.width(1, [SURE]) > 1
    assert tried


def test_rows_of_one_kind_say_nothing_of_others() -> None:
    _, costs = run(flat)
    assert costs.width(32, [SURE] * 32) == 1


def test_of_two_ways_the_quicker_is_taken_whatever_its_first_steps_compiled() -> None:
    ways = FasterOfTwo()

    def taken(steps: int, seconds: dict[bool, float]) -> list[bool]:
        chosen: list[bool] = []
        for _ in range(steps):
            chosen.append(ways.choose(8))
            compiles = chosen.count(chosen[-1]) == 1
            ways.observe(8, chosen[-1], 0.06 if compiles else seconds[chosen[-1]])
        return chosen

    first = taken(2048, {False: 0.02, True: 0.01})
    assert not first[0]
    assert sum(not way for way in first) < 20, "a few at first"
    again = taken(2048, {False: 0.02, True: 0.04})
    assert sum(again) < 20, "both are measured again"
    assert ways.choose(1) is False, "other numbers of rows are measured for themselves"


def test_times_of_an_earlier_start_let_drafts_begin_at_once() -> None:
    _, before = run(flat)
    costs = StepCosts()
    assert costs.width(1, [SURE]) == 1
    costs.recall(before.times)
    assert costs.width(1, [SURE]) == before.width(1, [SURE]) == 16


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_times_of_an_earlier_start_that_lie_do_not_last(factor: float) -> None:
    _, before = run(flat)
    costs = StepCosts()
    costs.recall({key: seconds * factor for key, seconds in before.times.items()})
    for width in (1, 16, 1, 16, 1, 16):
        costs.observe(1, width, flat(width))
    assert costs.known(1, 1) == costs.known(1, 16) == flat(1)


def test_one_step_that_compiled_kernels_does_not_speak_against_an_earlier_start() -> None:
    costs = StepCosts()
    costs.recall({(1, 1): 0.01, (1, 8): 0.012, (3, 8): 9.0, (1, 7): 9.0})
    costs.observe(1, 8, 1.0)
    assert costs.known(1, 8) == 0.012
    assert costs.times.keys() == {(1, 1), (1, 8)}, "what is no size of ours is not taken"
