"""Draft policy: the number of tokens that a step verifies, and whether drafts make it faster.

Choice of the width of a step: the number of tokens per row in one forward pass, its newest token and its draft.

Drafts of a drafting model, with their measured times and acceptance.

Speculator: the drafter of an engine, which uses drafts from lookup and from a model as long as they make steps
faster.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from protocol.stats import DraftStats, Stats
from worker.errors import is_allocation_failure, is_gpu_fault
from worker.model.pass_costs import WIDTHS, Duration, PassCosts, bucket
from worker.speculation.draft_state import BackOff, Branch, DraftedRow, DraftedText, Drafting
from worker.speculation.drafter import Drafter, Draw, Proposer, Rows
from worker.speculation.text_sources import (
    MAX_MATCH_TOKENS,
    MIN_MATCH_TOKENS,
    DraftSource,
    LookupGuess,
    OutputHistory,
    Tokens,
)

log = logging.getLogger("mlxd.worker")

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


# Assumed probability that a drafted token is accepted if all tokens before it are. It is used until a draft has been
# verified.
PRIOR_ACCEPTANCE: Final = 0.75
# Minimum weight of a newly verified token in the average acceptance.
_MIN_LEARNING_RATE: Final = 0.02
# A time is dropped after this many look-ups without drafts, some hundreds of steps: drafting that seems too slow is
# not measured.
_MAX_LOOKUPS: Final = 2048
# Assumed time to draft a token, as a share of a plain step's time. It is used until drafting was measured twice.
_UNTRIED_TOKEN_SHARE: Final = 0.15


class Proposals:
    """Proposer with its acceptance by position in a draft, and its drafting times by rows and width."""

    def __init__(self, proposer: Proposer) -> None:
        self.proposer = proposer
        # By number of rows: seconds per drafted token of each row, and the number of look-ups of these seconds.
        self._token_s: dict[int, Duration] = {}
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
        lookups = self._lookups[key] = self._lookups.get(key, 0) + 1
        known, token_s = self._token_s.get(key), _UNTRIED_TOKEN_SHARE * plain
        if known is not None and lookups - known.used > _MAX_LOOKUPS:
            del self._token_s[key]
        elif known is not None:
            token_s = known.seconds if known.is_trusted else min(token_s, known.seconds)
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
        """Learn the time of a drafted token."""
        known, lookups = self._token_s.get(key), self._lookups.get(key, 0)
        if known is None:
            self._token_s[key] = Duration(token_s, token_s, lookups)
        else:
            known.observe(token_s, lookups)

    def learn(self, drafted: int, right: int) -> None:
        """Record that `right` of the `drafted` tokens of a draft were accepted."""
        for at in range(min(right + 1, drafted)):
            self._counts[at] += 1
            step = max(_MIN_LEARNING_RATE, 1 / (4 + self._counts[at]))
            self._rates[at] += step * ((at < right) - self._rates[at])


# Assumed acceptance of looked-up tokens until a looked-up token has been verified.
_PRIOR_ACCEPTANCE: Final = 0.8
# Weight of a newly verified token in the acceptance of its class of matches, then in that of its row.
_LEARNING_RATE: Final = 0.02
_ROW_LEARNING_RATE: Final = 0.15
# Whenever a row has a draft, the row's acceptance moves back by this share towards the assumed acceptance, so that a
# row whose drafts were wrong is tried again. A model always has a draft, so its share is smaller.
_RECOVERY_RATE: Final = 0.02
_MODEL_RECOVERY_RATE: Final = 0.005
_MODELS: Final = (DraftSource.HEAD, DraftSource.EAGLE, DraftSource.MODEL, DraftSource.BLOCK, DraftSource.ASSISTANT)
# A row whose drafts are repeatedly wrong from the first token has no lookup for 1, 3, 7, then 15 steps; a batch whose
# drafts would not make steps faster has none for 1, then 3 steps. The rows of a batch pause together, because a block
# is only worth its time if many rows have drafts. The constants are maximum exponents of 2.
_MAX_ROW_BACK_OFF: Final = 4
_MAX_BATCH_BACK_OFF: Final = 2
# Maximum number of tokens of a row's text that a tick indexes: a whole long prompt would take the time of several
# steps.
_INDEXED_TOKENS_PER_TICK: Final = 4096
# Minimum match length of each class of matches. Each class has its own acceptance.
_MATCH_LENGTHS: Final = (3, 5, 9, 17)


@dataclass(slots=True)
class DraftCounts:
    """Counts of the drafts from one source since the engine started."""

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0
    # For each position, the number of drafts whose token there was accepted.
    by_position: list[int] = field(default_factory=lambda: [0] * (WIDTHS[-1] - 1))


class Speculator(Drafter):
    """Drafter of an engine. Acceptance and times that it learns from one batch are used for the next."""

    widest = WIDTHS[-1]

    def __init__(self, proposer: Proposer | None = None, costs: PassCosts | None = None) -> None:
        self.costs = costs or PassCosts()
        self._proposals = Proposals(proposer) if proposer is not None else None
        absent = [source for source in _MODELS if proposer is None or proposer.source != source]
        self.counts = {source: DraftCounts() for source in DraftSource if source not in absent}
        self.token_bytes = proposer.token_bytes if proposer is not None else 0
        self._history = OutputHistory()
        # Texts of rows that are not completely indexed, the oldest first.
        self._unindexed: list[DraftedText] = []
        self._rates: dict[tuple[DraftSource, int], float] = {}
        self._back_off = BackOff()
        # Drafts of the newest block, by row.
        self._guesses: list[LookupGuess | None] = []

    def stats(self) -> Stats:
        drafted = tuple(
            DraftStats(source, counts.drafts, counts.tokens, counts.accepted, tuple(counts.by_position))
            for source, counts in self.counts.items()
        )
        return Stats(drafted=drafted, draft_width=self.costs.width, draft_gain=self.gain)

    @property
    def gain(self) -> float:
        """Return the tokens per second of recent blocks divided by those of plain steps; 0.0 before any block.

        A block takes no less time than a plain step, so a higher gain than its width is an error of the times.
        """
        rows, width = self.costs.block_rows, self.costs.block_width
        if width == 1:
            return 0.0
        plain_s = self.costs.scaled_step(rows, 1)
        draft_s = self._proposals.seconds(rows, width, plain_s) if self._proposals else 0.0
        return min(self.costs.gain(rows, width, draft_s), width)

    @property
    def nbytes(self) -> int:
        return self._proposals.proposer.nbytes if self._proposals is not None else 0

    @property
    def unread(self) -> int:
        return self._proposals.proposer.unread if self._proposals is not None else 0

    def read(self, count: int) -> int:
        if self._proposals is None:
            return 0
        try:
            return self._proposals.proposer.read(count)
        except Exception as error:  # any error of the drafting model ends only its drafts
            self._disable_model(self._proposals, error)
            return 0

    def begin(self, draw: Draw, rows: Rows) -> None:
        if self._proposals is not None:
            self._proposals.proposer.begin(draw, rows)

    def add(self, row: DraftedRow, tokens: Tokens, drafting: Drafting) -> None:
        if drafting.most > 0:
            followed = row.draft.followed = DraftedText.of(tokens, drafting)
            followed.rate, followed.model_rate = _PRIOR_ACCEPTANCE, PRIOR_ACCEPTANCE
            self._unindexed.append(followed)

    def on_tick(self) -> None:
        if self._unindexed and self._unindexed[0].lookup.index(_INDEXED_TOKENS_PER_TICK):
            del self._unindexed[0]

    def discard(self, row: DraftedRow) -> None:
        followed, row.draft.followed = row.draft.followed, None
        if followed is not None:
            # A row may end before `on_tick` has indexed it.
            if followed in self._unindexed:
                self._unindexed.remove(followed)
            text = followed.lookup.text
            self._history.add(followed.drafting.salt, text, len(text) - followed.begin)
            if self._proposals is not None:
                self._proposals.proposer.discard(row)

    def note(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        followed = row.draft.followed
        if followed is not None:
            followed.lookup.extend(tokens)
            if followed.branch is not None:
                followed.followed += len(tokens)
                followed.branch = followed.branch if followed.branch.advance(tokens) else None

    def follow(self, row: DraftedRow, branch: Branch) -> None:
        if row.draft.followed is not None:
            row.draft.followed.branch, row.draft.followed.followed = branch, 0

    def expect(self, row: DraftedRow, tokens: Sequence[int]) -> None:
        if row.draft.followed is not None:
            row.draft.followed.expected = tokens

    def is_ready(self, rows: Sequence[DraftedRow], most: Sequence[int]) -> bool:
        if not may_pay(self.costs, len(rows)):
            return False
        odds: list[list[float]] = []
        is_pausing, has_guess = self._back_off.skips(), False
        models: list[list[float]] = []
        for each, limit in zip(rows, most, strict=True):
            row = each.draft.followed if limit > 0 else None
            if row is None:
                continue
            guess, own = None, list[float]()
            # The guess has one token more, because the newest token is not known yet.
            longest = min(limit, row.drafting.most) + 1
            if len(row.expected) > 1:
                own = [1.0] * (min(longest, len(row.expected)) - 1)
            elif not is_pausing and not row.back_off.skips():
                guess = self._branch(row, longest) or self._guess(row, longest)
            if guess is not None:
                row.rate += _RECOVERY_RATE * (_PRIOR_ACCEPTANCE - row.rate)
                own = self._odds(row, guess)[1:]
                has_guess = True
            odds.append(own)
            if self._proposals is not None:
                row.model_rate += _MODEL_RECOVERY_RATE * (PRIOR_ACCEPTANCE - row.model_rate)
                models.append(max(self._model_odds(each, row, limit), own, key=sum))
        if any(odds) and best_width(self.costs, len(rows), odds)[0] > 1:
            self._back_off.reset()
            return True
        if has_guess:
            self._back_off.fail(_MAX_BATCH_BACK_OFF)
        return bool(models) and self._best_with_model(len(rows), models)[0] > 1

    def drafts(self, rows: Sequence[DraftedRow], newest: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        self._guesses, odds = [], list[list[float]]()
        for each, token, limit in zip(rows, newest, most, strict=True):
            row, guess = each.draft.followed, None
            if row is not None and limit > 0:
                longest = min(limit, row.drafting.most, self.widest - 1)
                if len(row.expected) > 1 and row.expected[0] == token:
                    guess = LookupGuess(list(row.expected[1 : 1 + longest]), DraftSource.GRAMMAR, MAX_MATCH_TOKENS)
                else:
                    guess = self._branch(row, longest, token) or self._guess_behind(row, longest, token)
            odds.append(self._odds(row, guess) if row is not None and guess is not None else [])
            self._guesses.append(guess)
        width, gain = best_width(self.costs, len(rows), odds)
        if self._proposals is not None:
            width = self._ask_model(rows, newest, most, odds, width, gain)
        return [guess.tokens[: width - 1] if guess is not None else [] for guess in self._guesses]

    def _ask_model(
        self,
        rows: Sequence[DraftedRow],
        newest: Sequence[int],
        most: Sequence[int],
        odds: Sequence[list[float]],
        width: int,
        gain: float,
    ) -> int:
        """Replace a row's guess by the model's draft where that promises more accepted tokens, if the step gains more
        than the model's time costs.

        Return the step's width.
        """
        assert self._proposals is not None
        models = [
            self._model_odds(row, row.draft.followed, limit) if row.draft.followed is not None else []
            for row, limit in zip(rows, most, strict=True)
        ]
        mixed = [max(model, own, key=sum) for model, own in zip(models, odds, strict=True)]
        asked, asked_gain = self._best_with_model(len(rows), mixed)
        if asked <= 1 or asked_gain <= gain:
            return width
        followed = [
            (at, row.draft.followed.lookup.text)
            for at, (row, model, own) in enumerate(zip(rows, models, odds, strict=True))
            if row.draft.followed is not None and sum(model[: asked - 1]) > sum(own[: asked - 1])
        ]
        if not followed:
            return width
        known, texts = [rows[at] for at, _ in followed], [text for _, text in followed]
        try:
            drafts = self._proposals.propose(len(rows), known, texts, [newest[at] for at, _ in followed], asked)
        except Exception as error:  # any error of the drafting model ends only its drafts
            self._disable_model(self._proposals, error)
            return width
        for (at, _), drafted in zip(followed, drafts, strict=True):
            if draft := drafted[: len(models[at])]:
                self._guesses[at] = LookupGuess(draft, DraftSource(self._proposals.proposer.source), 0)
        return asked

    def _best_with_model(self, rows: int, odds: Sequence[Sequence[float]]) -> tuple[int, float]:
        proposals = self._proposals
        assert proposals is not None
        return best_width(self.costs, rows, odds, lambda width, plain: proposals.seconds(rows, width, plain))

    def _model_odds(self, row: DraftedRow, followed: DraftedText, limit: int) -> list[float]:
        assert self._proposals is not None
        if limit <= 0 or not followed.drafting.by_model or self._proposals.proposer.is_reading(row):
            return []
        return self._proposals.odds(followed.model_rate, min(limit, followed.drafting.most))

    def _disable_model(self, proposals: Proposals, error: Exception) -> None:
        """Stop drafting by the model. Raises `error` again if the device failed, or memory ran out."""
        if is_allocation_failure(error) or is_gpu_fault(error):
            raise error
        log.exception("the drafts of the model failed; from now on there are none until it is loaded again")
        self._proposals = None
        proposals.proposer.end()

    def verified(self, rows: Sequence[DraftedRow], drafts: Sequence[Sequence[int]], accepted: Sequence[int]) -> None:
        for each, guess, draft, right in zip(rows, self._guesses, drafts, accepted, strict=True):
            row = each.draft.followed
            if row is None or guess is None or not draft:
                continue
            counts = self.counts[guess.source]
            counts.drafts += 1
            counts.tokens += len(draft)
            counts.accepted += right
            row.counts.drafted += len(draft)
            row.counts.accepted += right
            if guess.source is DraftSource.PREDICTION:
                row.counts.predicted += len(draft)
                row.counts.predicted_accepted += right
            for at in range(right):
                counts.by_position[at] += 1
            if guess.source is not DraftSource.GRAMMAR:  # a grammar's draft was certain, so nothing is learned from it
                self._learn(row, guess, len(draft), right)

    def _learn(self, row: DraftedText, guess: LookupGuess, drafted: int, right: int) -> None:
        seen = [1.0] * right + [0.0] * (right < drafted)
        if self._proposals is not None and guess.source in _MODELS:
            self._proposals.learn(drafted, right)
            for is_right in seen:
                row.model_rate += _ROW_LEARNING_RATE * (is_right - row.model_rate)
            return
        if right:
            row.back_off.reset()
        else:
            row.back_off.fail(_MAX_ROW_BACK_OFF)
        key = _kind(guess)
        rate = self._rates.get(key, _PRIOR_ACCEPTANCE)
        for is_right in seen:
            rate += _LEARNING_RATE * (is_right - rate)
            row.rate += _ROW_LEARNING_RATE * (is_right - row.rate)
        self._rates[key] = rate

    def _guess(self, row: DraftedText, most: int) -> LookupGuess | None:
        return row.lookup.guess(most, self._history.of(row.drafting.salt))

    def _guess_behind(self, row: DraftedText, most: int, newest: int) -> LookupGuess | None:
        row.lookup.extend((newest,))
        guess = self._guess(row, most)
        row.lookup.shorten()
        return guess

    def _branch(self, row: DraftedText, most: int, newest: int | None = None) -> LookupGuess | None:
        """Return at most `most` tokens of the row's branch; with `newest`, those after that token, or None if the
        branch does not continue with that token.
        """
        if row.branch is None:
            return None
        match = min(MIN_MATCH_TOKENS + row.followed, MAX_MATCH_TOKENS)
        tokens = row.branch.next_tokens(min(most, match) + (newest is not None))
        if newest is not None:
            tokens = tokens[1:] if tokens[:1] == [newest] else []
        return LookupGuess(tokens, DraftSource.TREE, match) if tokens else None

    def _odds(self, row: DraftedText, guess: LookupGuess) -> list[float]:
        """Return, for each token of a draft, the probability that the draft is accepted up to it, by its class of
        matches and its row.
        """
        if guess.source is DraftSource.GRAMMAR:
            return [1.0] * len(guess.tokens)
        rate = (self._rates.get(_kind(guess), _PRIOR_ACCEPTANCE) + row.rate) / 2
        return [rate ** (at + 1) for at in range(len(guess.tokens))]


def _kind(guess: LookupGuess) -> tuple[DraftSource, int]:
    return guess.source, max(least for least in _MATCH_LENGTHS if guess.match >= least)
