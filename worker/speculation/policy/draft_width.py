"""Measured step times by width, and the choice of the fastest width.

The width of a step is the number of tokens of a row in one forward pass: its newest token and its draft.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

# Width 1 is a plain step, without drafts.
WIDTHS: Final = (1, 2, 4, 8, 16)
# Drafts are used if they promise at least this factor times the tokens per second of plain steps.
_MIN_GAIN: Final = 1.05
# Assumed factor by which a step's time grows when its width doubles to an untried width, unless a narrower doubling
# cost more.
_UNTRIED_GROWTH: Final = 1.25
# A width is tried only if drafts promise in total this many tokens beyond one per row.
_MIN_PROMISED_TOKENS: Final = 1.0
# Weights of a new time in the average. A slower time counts less: the first step of a width may have compiled kernels.
_FASTER_WEIGHT: Final = 0.5
_SLOWER_WEIGHT: Final = 0.2
# A time is dropped after this many steps without its width, because contexts have changed. A time with few measurements
# is dropped sooner: after this many steps per measurement.
_MAX_AGE_STEPS: Final = 512
_MAX_AGE_STEPS_PER_MEASUREMENT: Final = 128
# Maximum factor between a recalled time and the first measured steps; beyond it the recalled time is replaced. A slower
# step must be confirmed by a second one, because the first step of a width may have compiled kernels.
_MAX_RECALLED_FACTOR: Final = 1.5
# A time that was measured less than this many steps ago needs no new measurement.
_FRESH_STEPS: Final = 64
# Weight of the newest block in the average number of accepted tokens per row.
_TOKENS_WEIGHT: Final = 0.3
# Number of trials of each of two variants of a step; trials are repeated after `_RETRIAL_STEPS`.
_TRIAL_STEPS: Final = 6
_RETRIAL_STEPS: Final = 2048


class StepCosts:
    """Durations of steps in seconds, by number of rows (rounded to a power of two) and width.

    The engine's pacer writes this table and sizes prefill chunks by it; the speculator chooses widths by it.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], float] = {}
        # Serial number of the newest step, and the number of steps, by number of rows and width.
        self._used: dict[tuple[int, int], tuple[int, int]] = {}
        self._steps = 0
        # Recalled times that are not confirmed yet; the value is whether one step was much slower.
        self._recalled: dict[tuple[int, int], bool] = {}
        # Number of rows and width of the newest step, and of the newest block, which is a step with drafts. `tokens` is
        # the average number of tokens that a block gave each row.
        self.newest = self.block = (1, 1)
        self.tokens = 1.0

    @property
    def times(self) -> dict[tuple[int, int], float]:
        """Seconds of a step by number of rows and width."""
        return dict(self._times)

    def recall(self, times: Mapping[tuple[int, int], float]) -> None:
        """Use the times of an earlier run of the worker until steps are measured."""
        for key in times.keys() - self._times.keys():
            if key[1] in WIDTHS and key[0] == bucket(key[0]):
                self._times[key] = times[key]
                self._used[key] = self._steps, _MAX_AGE_STEPS // _MAX_AGE_STEPS_PER_MEASUREMENT
                self._recalled[key] = False

    def observe(self, rows: int, width: int, seconds: float, tokens: int = 0) -> None:
        """Record a step. `seconds` is 0.0 if unknown; `tokens` is the number of tokens that all rows together got."""
        self._steps += 1
        key = self.newest = bucket(rows), width_of(width)
        if width > 1 and tokens:
            self.tokens = (
                tokens / rows if self.block[1] == 1 else self.tokens + _TOKENS_WEIGHT * (tokens / rows - self.tokens)
            )
            self.block = key
        if seconds <= 0.0:
            return
        old = self._times.get(key)
        if old is not None and (is_doubted := self._recalled.pop(key, None)) is not None:
            if seconds > _MAX_RECALLED_FACTOR * old and not is_doubted:
                self._recalled[key], seconds = True, old
            elif not old / _MAX_RECALLED_FACTOR <= seconds <= old * _MAX_RECALLED_FACTOR:
                old = None
        rate = 0.0 if old is None else _FASTER_WEIGHT if seconds < old else _SLOWER_WEIGHT
        self._times[key] = seconds if old is None else old + rate * (seconds - old)
        self._used[key] = self._steps, self._used.get(key, (0, 0))[1] + 1
        for stale in [each for each in self._used if each[1] > 1 and self._is_stale(each)]:
            del self._times[stale], self._used[stale]
            self._recalled.pop(stale, None)

    def _is_stale(self, key: tuple[int, int]) -> bool:
        newest, count = self._used[key]
        return self._steps - newest > min(_MAX_AGE_STEPS, _MAX_AGE_STEPS_PER_MEASUREMENT * count)

    def known(self, rows: int, width: int) -> float | None:
        return self._times.get((bucket(rows), width_of(width)))

    def is_fresh(self, rows: int, width: int) -> bool:
        """Return whether a step with these rows and width was measured recently."""
        return self._steps - self._used.get((bucket(rows), width_of(width)), (-_FRESH_STEPS, 0))[0] < _FRESH_STEPS

    def scaled(self, rows: int, width: int) -> float:
        """Return the seconds of a step, estimated from the nearest known number of rows; 0.0 if none is known.

        Doubling the rows costs no time while reading the weights dominates, and at most doubles the time; the assumed
        factor is the square root of 2.
        """
        rows, width = bucket(rows), width_of(width)
        known = [at for at, wide in self._times if wide == width]
        nearest = min(known, key=lambda at: abs(math.log2(at / rows)), default=0)
        return self._times[nearest, width] * math.sqrt(rows / nearest) if nearest else 0.0

    def gain(self, rows: int, width: int, drafting_s: float = 0.0) -> float:
        """Return the tokens per second of blocks divided by those of plain steps; 0.0 if a time is unknown.

        The tokens per row are the average of recent blocks. `drafting_s` is the time to make the drafts of a block.
        """
        plain_s, block_s = self.scaled(rows, 1), self.scaled(rows, width)
        return self.tokens * plain_s / (block_s + drafting_s) if block_s else 0.0

    def predict(self, rows: int, width: int) -> float | None:
        """Return the seconds of a step, extrapolated from the widest known narrower step; None if the plain step is
        unknown.

        The time is assumed to grow as in the last known doubling of the width. The doubling from 1 to 2 does not count,
        because one token per row runs on other kernels.
        """
        if self.known(rows, 1) is None:
            return None
        at = next(at for at in range(WIDTHS.index(width), -1, -1) if self.known(rows, WIDTHS[at]) is not None)
        seconds = self._times[bucket(rows), WIDTHS[at]]
        before = self.known(rows, WIDTHS[at - 1]) if at > 1 else None
        growth = max(_UNTRIED_GROWTH, seconds / before) if before is not None else _UNTRIED_GROWTH
        return seconds * growth ** math.log2(width / WIDTHS[at])

    def may_pay(self, rows: int) -> bool:
        """Return whether any width would be faster than plain steps if all drafts were accepted."""
        plain = self.predict(rows, 1)
        if plain is None:
            return False
        return any((self.predict(rows, width) or math.inf) * _MIN_GAIN < plain * width for width in WIDTHS[1:])

    def width(self, rows: int, odds: Sequence[Sequence[float]]) -> int:
        """Return the width with the most tokens per second.

        `odds[i][j]` is the probability that row i's draft is accepted up to token j.
        """
        return self.best(rows, odds)[0]

    def best(
        self, rows: int, odds: Sequence[Sequence[float]], drafting: Callable[[int, float], float] | None = None
    ) -> tuple[int, float]:
        """Return the width with the most tokens per second, and that rate; for width 1, that rate is multiplied by
        `_MIN_GAIN`.

        `drafting` returns the seconds to make drafts of a width, given the seconds of a plain step.
        """
        plain = self.predict(rows, 1)
        if plain is None:
            return 1, 0.0
        best, best_rate = 1, _MIN_GAIN * rows / plain
        is_promising = sum(map(sum, odds)) >= _MIN_PROMISED_TOKENS
        for narrower, width in pairwise(WIDTHS):
            # A width is tried only after the next narrower width was measured.
            if self.known(rows, width) is None and not (is_promising and self.known(rows, narrower) is not None):
                continue
            seconds = self.predict(rows, width)
            tokens = rows + sum(sum(each[: width - 1]) for each in odds)
            if seconds is not None and drafting is not None:
                seconds += drafting(width, plain)
            if seconds is not None and tokens / seconds > best_rate:
                best, best_rate = width, tokens / seconds
        return best, best_rate


class FasterOfTwo:
    """Choice of the faster of two variants of a step, by trials of both that are repeated at intervals.

    The fastest step of a trial counts, because the first steps of a shape compile kernels. Without a measurement, the
    second variant is used.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], float] = {}
        self._asked: dict[int, int] = {}

    def choose(self, rows: int) -> bool:
        """Return whether a step with this many rows should use the second variant."""
        key = bucket(rows)
        asked = self._asked[key] = self._asked.get(key, -1) + 1
        trial = asked % _RETRIAL_STEPS
        if trial == 0:
            for is_second in (False, True):
                self._seconds.pop((key, is_second), None)
        if trial < 2 * _TRIAL_STEPS:
            return trial >= _TRIAL_STEPS
        first, second = (self._seconds.get((key, is_second), math.inf) for is_second in (False, True))
        return second <= first

    def observe(self, rows: int, is_second: bool, seconds: float) -> None:
        key = bucket(rows), is_second
        self._seconds[key] = min(seconds, self._seconds.get(key, math.inf))


def bucket(rows: int) -> int:
    """Return the nearest power of two."""
    return 1 << max(0, round(math.log2(rows)))


def width_of(width: int) -> int:
    """Return the smallest of `WIDTHS` that is not less than `width`."""
    return next((each for each in WIDTHS if each >= width), WIDTHS[-1])
