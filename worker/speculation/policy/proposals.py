"""Drafts of a drafting model, with their measured times and acceptance."""

import time
from collections.abc import Sequence
from typing import Final

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Proposer
from worker.speculation.policy.draft_width import WIDTHS, StepCosts
from worker.speculation.text_sources.indexed_text import Tokens

# Assumed probability that a drafted token is accepted if all tokens before it are. It is used until a draft has been
# verified.
PRIOR_ACCEPTANCE: Final = 0.75
# Minimum weight of a newly verified token in the average acceptance.
_MIN_LEARNING_RATE: Final = 0.02
# Assumed time to draft a token, as a share of a plain step's time. It is used until drafting has been measured.
_UNTRIED_TOKEN_SHARE: Final = 0.15


class Proposals:
    """Proposer with its acceptance by position in a draft, and its drafting times by rows and width."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self._costs = StepCosts()
        self._widest = proposer.longest + 1
        self._rates = [PRIOR_ACCEPTANCE] * (WIDTHS[-1] - 1)
        self._counts = [0] * (WIDTHS[-1] - 1)

    def odds(self, own: float, most: int) -> list[float]:
        """Return, for each token of a draft, the probability that the draft is accepted up to it; `own` is the row's
        own rate of acceptance.
        """
        odds: list[float] = []
        chance = 1.0
        for rate in self._rates[: min(most, self.proposer.longest)]:
            chance *= (rate + own) / 2
            odds.append(chance)
        return odds

    def seconds(self, rows: int, width: int, plain: float) -> float:
        """Return the seconds to draft for a step of this width; `plain` is the time of a plain step."""
        known = [(each, self._costs.known(rows, each)) for each in WIDTHS[1:]]
        each = [(abs(other - width), seconds / (other - 1)) for other, seconds in known if seconds is not None]
        return (min(width, self._widest) - 1) * (min(each)[1] if each else _UNTRIED_TOKEN_SHARE * plain)

    def propose(
        self, count: int, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], width: int
    ) -> list[list[int]]:
        """Return drafts for some of the batch's `count` rows, long enough for a step of this width if possible."""
        width = min(width, self._widest)
        began = time.perf_counter()
        drafts = self.proposer.propose(rows, texts, newest, width - 1)
        seconds = time.perf_counter() - began
        # A row has no draft while the drafter processes its prompt, which would distort the measured time.
        if all(drafts):
            self._costs.observe(count, width, seconds)
        return drafts

    def learn(self, drafted: int, right: int) -> None:
        """Record that `right` of the `drafted` tokens of a draft were accepted."""
        for at in range(min(right + 1, drafted)):
            self._counts[at] += 1
            step = max(_MIN_LEARNING_RATE, 1 / (4 + self._counts[at]))
            self._rates[at] += step * ((at < right) - self._rates[at])
