"""Costs of steps by their width, measured, and the width that pays."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final

# Tokens of a row in one forward pass; 1 is a step without drafts.
WIDTHS: Final = (1, 2, 4, 8, 16)
# Leave the plain step only for so much more.
_MARGIN: Final = 1.05
# Twice the width is hoped to cost so much more before it was tried, where the doublings before it do not say more …
_HOPE: Final = 1.25
# … which is done only where drafts promise so many tokens beyond one a row.
_PROMISE: Final = 1.0
# Times follow what gets quicker at once and what gets slower slowly: the first of a width may have compiled kernels.
_QUICKER: Final = 0.5
_SLOWER: Final = 0.2
# A width that was not run for so many steps is forgotten, as its time was another context's; sooner if it was run only
# a few times, as that may have been an accident.
_MEMORY: Final = 512
_MEMORY_OF_ONE: Final = 128
# What was known from before counts no more once a step took this many times less, or two in a row so many times more:
# the first of a width may have compiled kernels.
_DOUBT: Final = 1.5
# A time that was measured within so many passes is newer than any change of the machine or of contexts.
_FRESH: Final = 64
# Tokens that a block gives a row follow the newest ones by this much.
_FOLLOW: Final = 0.3
# Of two ways to run a step, each is tried so often, and again after so many steps.
_TRIALS: Final = 6
_AGAIN: Final = 2048


class StepCosts:
    """Seconds of a step by its number of rows, to the nearest power of two, and its width.

    The pacer of the loop writes this table and sizes chunks of prompts by it; the speculator chooses widths by it.
    """

    def __init__(self) -> None:
        self._times: dict[tuple[int, int], float] = {}
        # The newest step of each width, and how many there were.
        self._used: dict[tuple[int, int], tuple[int, int]] = {}
        self._steps = 0
        # Those of an earlier start that were not confirmed in this one, and whether a step has spoken against it.
        self._recalled: dict[tuple[int, int], bool] = {}
        # Rows and width of the newest step and of the newest block, and tokens that blocks give a row.
        self.newest = self.block = (1, 1)
        self.tokens = 1.0

    @property
    def times(self) -> dict[tuple[int, int], float]:
        """Seconds by rows and width."""
        return dict(self._times)

    def recall(self, times: Mapping[tuple[int, int], float]) -> None:
        """Begin with the times of an earlier start, until steps are measured."""
        for key in times.keys() - self._times.keys():
            if key[1] in WIDTHS and key[0] == bucket(key[0]):
                self._times[key] = times[key]
                self._used[key] = self._steps, _MEMORY // _MEMORY_OF_ONE
                self._recalled[key] = False

    def observe(self, rows: int, width: int, seconds: float, tokens: int = 0) -> None:
        """A step has taken so long, and has given its rows so many tokens; 0.0 where its time is not known."""
        self._steps += 1
        key = self.newest = bucket(rows), width_of(width)
        if width > 1 and tokens:
            self.tokens = tokens / rows if self.block[1] == 1 else self.tokens + _FOLLOW * (tokens / rows - self.tokens)
            self.block = key
        if seconds <= 0.0:
            return
        old = self._times.get(key)
        if old is not None and (is_doubted := self._recalled.pop(key, None)) is not None:
            if seconds > _DOUBT * old and not is_doubted:
                self._recalled[key], seconds = True, old
            elif not old / _DOUBT <= seconds <= old * _DOUBT:
                old = None
        rate = 0.0 if old is None else _QUICKER if seconds < old else _SLOWER
        self._times[key] = seconds if old is None else old + rate * (seconds - old)
        self._used[key] = self._steps, self._used.get(key, (0, 0))[1] + 1
        for stale in [each for each in self._used if each[1] > 1 and self._is_stale(each)]:
            del self._times[stale], self._used[stale]
            self._recalled.pop(stale, None)

    def _is_stale(self, key: tuple[int, int]) -> bool:
        newest, count = self._used[key]
        return self._steps - newest > min(_MEMORY, _MEMORY_OF_ONE * count)

    def known(self, rows: int, width: int) -> float | None:
        return self._times.get((bucket(rows), width_of(width)))

    def is_fresh(self, rows: int, width: int) -> bool:
        """Whether such a step was measured lately."""
        return self._steps - self._used.get((bucket(rows), width_of(width)), (-_FRESH, 0))[0] < _FRESH

    def scaled(self, rows: int, width: int) -> float:
        """Seconds of a step; where so many rows were not seen, from the nearest number that was. 0.0 is unknown.

        Twice the rows cost between nothing more, where reading the weights takes longest, and twice as much.
        """
        rows, width = bucket(rows), width_of(width)
        known = [at for at, wide in self._times if wide == width]
        nearest = min(known, key=lambda at: abs(math.log2(at / rows)), default=0)
        return self._times[nearest, width] * math.sqrt(rows / nearest) if nearest else 0.0

    def gain(self, rows: int, width: int, drafting_s: float = 0.0) -> float:
        """Tokens a second of blocks ÷ of plain steps, by what blocks gave lately; 0.0 where a time is not known.

        `drafting_s` is what drafts of such a block take beside it.
        """
        plain_s, block_s = self.scaled(rows, 1), self.scaled(rows, width)
        return self.tokens * plain_s / (block_s + drafting_s) if block_s else 0.0

    def predict(self, rows: int, width: int) -> float | None:
        """From the widest step that is known up to this width; None without a plain one.

        What the second token costs says nothing of more: kernels for one token differ. The next doublings do.
        """
        if self.known(rows, 1) is None:
            return None
        at = next(at for at in range(WIDTHS.index(width), -1, -1) if self.known(rows, WIDTHS[at]) is not None)
        seconds = self._times[bucket(rows), WIDTHS[at]]
        before = self.known(rows, WIDTHS[at - 1]) if at > 1 else None
        growth = max(_HOPE, seconds / before) if before is not None else _HOPE
        return seconds * growth ** math.log2(width / WIDTHS[at])

    def may_pay(self, rows: int) -> bool:
        """Whether there is a width that would pay if each draft were right to its end."""
        plain = self.predict(rows, 1)
        if plain is None:
            return False
        return any((self.predict(rows, width) or math.inf) * _MARGIN < plain * width for width in WIDTHS[1:])

    def width(self, rows: int, odds: Sequence[Sequence[float]]) -> int:
        """The width with the most tokens a second. `odds[i][j]` is the chance that draft token j of row i counts."""
        return self.best(rows, odds)[0]

    def best(
        self, rows: int, odds: Sequence[Sequence[float]], drafting: Callable[[int, float], float] | None = None
    ) -> tuple[int, float]:
        """That width, and the tokens a second that it promises, or that a plain step would have to give.

        `drafting` are the seconds of drafts of a width, given those of a plain step.
        """
        plain = self.predict(rows, 1)
        if plain is None:
            return 1, 0.0
        best, best_rate = 1, _MARGIN * rows / plain
        is_promising = sum(map(sum, odds)) >= _PROMISE
        for narrower, width in pairwise(WIDTHS):
            # One that was not measured is tried behind the one before it.
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
    """The quicker of two ways to run a step, measured: both a few times at first, and again now and then.

    What counts is the quickest step of a trial, as the first ones of a shape compile kernels. Without one, it is the
    second way.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], float] = {}
        self._asked: dict[int, int] = {}

    def choose(self, rows: int) -> bool:
        """Whether to take the second way for a step of so many rows."""
        key = bucket(rows)
        asked = self._asked[key] = self._asked.get(key, -1) + 1
        trial = asked % _AGAIN
        if trial == 0:
            for is_second in (False, True):
                self._seconds.pop((key, is_second), None)
        if trial < 2 * _TRIALS:
            return trial >= _TRIALS
        first, second = (self._seconds.get((key, is_second), math.inf) for is_second in (False, True))
        return second <= first

    def observe(self, rows: int, is_second: bool, seconds: float) -> None:
        key = bucket(rows), is_second
        self._seconds[key] = min(seconds, self._seconds.get(key, math.inf))


def bucket(rows: int) -> int:
    """The nearest power of two."""
    return 1 << max(0, round(math.log2(rows)))


def width_of(width: int) -> int:
    """The width as which one counts: the next of `WIDTHS`."""
    return next((each for each in WIDTHS if each >= width), WIDTHS[-1])
