"""Proposals of a model that drafts, with what they cost and how many are right."""

import time
from collections.abc import Sequence
from typing import Final

from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Proposer
from worker.speculation.policy.draft_width import WIDTHS, StepCosts
from worker.speculation.text_sources.indexed_text import Tokens

# Chance that a token of a draft is right where those before it are, before anything was seen …
PRIOR: Final = 0.75
# … and how much each one that was verified says, at least.
_LEARN: Final = 0.02
# A token of a draft is hoped to take this share of a plain step before it was tried.
_HOPE: Final = 0.15


class Proposals:
    """A proposer and its record: rates by the place in a draft, and seconds by rows and width."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        self._costs = StepCosts()
        self._widest = proposer.longest + 1
        self._rates = [PRIOR] * (WIDTHS[-1] - 1)
        self._counts = [0] * (WIDTHS[-1] - 1)

    def odds(self, own: float, most: int) -> list[float]:
        """The chance of each token of a draft, all before it included; `own` is the row's rate."""
        odds: list[float] = []
        chance = 1.0
        for rate in self._rates[: min(most, self.proposer.longest)]:
            chance *= (rate + own) / 2
            odds.append(chance)
        return odds

    def seconds(self, rows: int, width: int, plain: float) -> float:
        """Of drafts for steps of this width, of which a plain one takes so long."""
        known = [(each, self._costs.known(rows, each)) for each in WIDTHS[1:]]
        each = [(abs(other - width), seconds / (other - 1)) for other, seconds in known if seconds is not None]
        return (min(width, self._widest) - 1) * (min(each)[1] if each else _HOPE * plain)

    def propose(
        self, count: int, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], width: int
    ) -> list[list[int]]:
        """Drafts of some of `count` rows, for a step of this width or as long as they can be."""
        width = min(width, self._widest)
        began = time.perf_counter()
        drafts = self.proposer.propose(rows, texts, newest, width - 1)
        seconds = time.perf_counter() - began
        # One that has a prompt to read first takes longer this once.
        if all(drafts):
            self._costs.observe(count, width, seconds)
        return drafts

    def learn(self, drafted: int, right: int) -> None:
        """So many tokens of a draft were right."""
        for at in range(min(right + 1, drafted)):
            self._counts[at] += 1
            step = max(_LEARN, 1 / (4 + self._counts[at]))
            self._rates[at] += step * ((at < right) - self._rates[at])
