"""The width of a step follows what passes of that size were measured to take."""

from collections.abc import Callable

import pytest

from protocol.timing_profile import PassKind
from worker.model.pass_costs import WIDTHS, PassCosts
from worker.speculation.policy import best_width, may_pay

SURE = [1.0] * 15


def width(costs: PassCosts, rows: int, odds: list[list[float]]) -> int:
    return best_width(costs, rows, odds)[0]


def run(cost: Callable[[int], float], rows: int = 1, odds: float = 0.95, steps: int = 2000) -> tuple[float, PassCosts]:
    """Tokens a second ÷ those of plain steps, on a device on which a step of so many tokens takes so long."""
    costs, wide = PassCosts(), 1
    chances = [[odds ** (at + 1) for at in range(15)]] * rows
    tokens, seconds = 0.0, 0.0
    for _ in range(steps):
        tokens += rows + sum(sum(each[: wide - 1]) for each in chances)
        seconds += cost(rows * wide)
        costs.observe_step(rows, wide, cost(rows * wide))
        wide = width(costs, rows, chances)
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
    assert width(costs, 1, [[0.95 ** (at + 1) for at in range(15)]]) == WIDTHS[-1]
    assert gain > 10


def test_a_dear_second_token_does_not_hide_that_more_are_cheap() -> None:
    assert run(cliff)[0] > 4


@pytest.mark.parametrize("rows", [1, 4, 8, 32])
@pytest.mark.parametrize("odds", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("cost", [flat, linear, matrix, cliff])
def test_drafts_are_never_a_loss(cost: Callable[[int], float], odds: float, rows: int) -> None:
    assert run(cost, rows, odds)[0] >= 0.98


def test_nothing_is_tried_before_a_plain_step_was_measured() -> None:
    costs = PassCosts()
    assert width(costs, 1, [SURE]) == 1
    assert not may_pay(costs, 1)
    costs.observe_step(1, 1, 0.01)
    assert may_pay(costs, 1)
    assert width(costs, 1, [SURE]) == 2, "one doubling at a time"


def test_what_was_once_slow_is_tried_again() -> None:
    costs = PassCosts()
    for seconds in (0.01, 0.01):
        costs.observe_step(1, 1, seconds)
    for seconds in (1.0, 1.0):
        costs.observe_step(1, 2, seconds)
    assert width(costs, 1, [SURE]) == 1
    tried = 0
    for _ in range(600):
        costs.observe_step(1, 1, 0.01)
        tried += width(costs, 1, [SURE]) > 1
    assert tried


def test_rows_of_one_kind_say_nothing_of_others() -> None:
    _, costs = run(flat)
    assert width(costs, 32, [SURE] * 32) == 1


@pytest.mark.parametrize("prompted", [0, 16])
def test_a_block_beside_a_prompt_must_pay_for_the_time_that_the_prompt_waits(prompted: int) -> None:
    costs, rows = PassCosts(), 4
    for _ in range(2):
        costs.observe_step(rows, 1, 0.010)
        costs.observe_step(rows, 2, 0.012)
        costs.observe_chunk(PassKind.FUSED, 16, 0.030)
    costs.prompted = prompted
    # The pass does 1.3 times the work of a step in 1.2 times the time; beside the chunk, 1.075 and 1.05 times.
    assert (width(costs, rows, [[0.3]] * rows) > 1) == (prompted == 0)
    assert width(costs, rows, [SURE] * rows) > 1


@pytest.mark.parametrize(("block_s", "is_wide"), [(0.0135, True), (0.0145, False)])
@pytest.mark.parametrize("kind", [PassKind.FUSED, PassKind.ALONE])
def test_drafts_make_prompts_of_the_same_tick_wait_at_most_a_tenth_longer(
    kind: PassKind, block_s: float, is_wide: bool
) -> None:
    costs, rows = PassCosts(), 4
    for _ in range(2):
        costs.observe_step(rows, 1, 0.010)
        costs.observe_step(rows, 2, block_s)
        costs.observe_chunk(kind, 16, 0.030)
    costs.prompted, costs.prompt_kind = 16, kind
    assert (width(costs, rows, [SURE] * rows) > 1) == is_wide
    costs.prompted = 0
    assert width(costs, rows, [SURE] * rows) > 1, "no prompt waits"


def test_beside_a_chunk_that_was_never_measured_a_block_may_take_little_longer_than_a_step() -> None:
    costs = PassCosts()
    for _ in range(2):
        costs.observe_step(1, 1, 0.010)
        costs.observe_step(1, 2, 0.012)
    costs.prompted = 32
    assert width(costs, 1, [SURE]) == 1


def test_times_of_an_earlier_start_let_drafts_begin_at_once() -> None:
    _, before = run(flat)
    assert width(PassCosts(), 1, [SURE]) == 1
    assert width(PassCosts(before.records()), 1, [SURE]) == width(before, 1, [SURE]) == 16
