"""Drafts of a drafting model, with their measured times and acceptance."""

import math
import time
from collections.abc import Sequence
from typing import Final

from worker.model.pass_costs import WIDTHS, bucket
from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Proposer
from worker.speculation.text_sources.indexed_text import Tokens

# Assumed probability that a drafted token is accepted if all tokens before it are. It is used until a draft has been
# verified.
PRIOR_ACCEPTANCE: Final = 0.75
# Minimum weight of a newly verified token in the average acceptance.
_MIN_LEARNING_RATE: Final = 0.02
# Weights of a new time in the smoothed time to draft a token.
_FASTER_WEIGHT: Final = 0.5
_SLOWER_WEIGHT: Final = 0.2
# A time is dropped after this many look-ups without drafts, some hundreds of steps: drafting that seems too slow is
# not measured.
_MAX_LOOKUPS: Final = 2048
# Assumed time to draft a token, as a share of a plain step's time. It is used until drafting was measured twice.
_UNTRIED_TOKEN_SHARE: Final = 0.15


class Proposals:
    """Proposer with its acceptance by position in a draft, and its drafting times by rows and width."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        # By number of rows: smoothed and newest seconds per drafted token of each row, and the number of look-ups of
        # these seconds since drafts were measured.
        self._token_s: dict[int, float] = {}
        self._newest_s: dict[int, float] = {}
        self._lookups: dict[int, int] = {}
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
        key = bucket(rows)
        self._lookups[key] = self._lookups.get(key, 0) + 1
        if self._lookups[key] > _MAX_LOOKUPS:
            self._token_s.pop(key, None)
            self._newest_s.pop(key, None)
        untried_s = min(_UNTRIED_TOKEN_SHARE * plain, self._newest_s.get(key, math.inf))
        token_s = self._token_s.get(key, untried_s)
        return (min(width, self._widest) - 1) * token_s

    def propose(
        self, count: int, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], width: int
    ) -> list[list[int]]:
        """Return drafts for some of the batch's `count` rows, long enough for a step of this width if possible."""
        width = min(width, self._widest)
        began = time.perf_counter()
        drafts = self.proposer.propose(rows, texts, newest, width - 1)
        seconds = time.perf_counter() - began
        # A row has no draft while the drafter processes its prompt. The time of that work is not recorded as drafting
        # time.
        if all(drafts):
            self._observe(bucket(count), seconds / (width - 1))
        return drafts

    def _observe(self, key: int, token_s: float) -> None:
        """Learn the time of a drafted token. The first drafts may compile kernels, so the faster of two counts."""
        before, self._newest_s[key], self._lookups[key] = self._newest_s.get(key), token_s, 0
        if before is not None:
            less = min(before, token_s)
            known = self._token_s.get(key, less)
            self._token_s[key] = known + (_FASTER_WEIGHT if less < known else _SLOWER_WEIGHT) * (less - known)

    def learn(self, drafted: int, right: int) -> None:
        """Record that `right` of the `drafted` tokens of a draft were accepted."""
        for at in range(min(right + 1, drafted)):
            self._counts[at] += 1
            step = max(_MIN_LEARNING_RATE, 1 / (4 + self._counts[at]))
            self._rates[at] += step * ((at < right) - self._rates[at])
