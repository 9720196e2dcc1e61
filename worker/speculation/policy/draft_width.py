"""Choice of the width of a step: the number of tokens per row in one forward pass, its newest token and its draft."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

from worker.model.pass_costs import WIDTHS, PassCosts

# Drafts are used if the pass does at least this many times the work of its time without drafts.
_MIN_GAIN: Final = 1.05
# Beside prompts a pass may take this many times its time without drafts: the prompts wait for it, and a first token
# matters more than later tokens that come sooner.
_PROMPT_WAIT: Final = 1.1
# A width is tried only if drafts promise in total this many tokens beyond one per row.
_MIN_PROMISED_TOKENS: Final = 1.0


def may_pay(costs: PassCosts, rows: int) -> bool:
    """Return whether any width would be worth its time if all drafts were accepted."""
    return best_width(costs, rows, [[1.0] * (WIDTHS[-1] - 1)] * rows)[0] > 1


def best_width(
    costs: PassCosts,
    rows: int,
    odds: Sequence[Sequence[float]],
    drafting: Callable[[int, float], float] | None = None,
) -> tuple[int, float]:
    """Return the best width of the next pass, and its gain over the same pass without drafts; 1.0 for width 1.

    `odds[i][j]` is the probability that row i's draft is accepted up to token j. `drafting` returns the seconds to make
    drafts of a width, given the seconds of a plain step. A pass with drafts saves later steps, so its work is worth the
    pass without drafts and the saved steps. The pass's time includes the wait of prompts that share its tick, which is
    bounded.
    """
    plain_s = costs.step(rows, 1)
    if plain_s is None:
        return 1, 1.0
    chunk_s = costs.chunk(costs.prompt_kind, costs.prompted) or 0.0
    longest_s = _PROMPT_WAIT * (chunk_s + plain_s) if costs.prompted else math.inf
    is_promising = sum(map(sum, odds)) >= _MIN_PROMISED_TOKENS
    best, best_gain = 1, 1.0
    for narrower, width in pairwise(WIDTHS):
        # A width is tried only after the next narrower width was measured.
        is_known = costs.has_step(rows, width, is_trusted=True)
        if not is_known and not (is_promising and costs.has_step(rows, narrower, is_trusted=narrower > 1)):
            continue
        step_s = (costs.step(rows, width) or 0.0) + (drafting(width, plain_s) if drafting is not None else 0.0)
        if chunk_s + step_s > longest_s:
            continue
        saved = sum(sum(each[: width - 1]) for each in odds) / rows
        gain = (chunk_s + plain_s * (1 + saved)) / (chunk_s + step_s)
        if gain > max(best_gain, _MIN_GAIN):
            best, best_gain = width, gain
    return best, best_gain
