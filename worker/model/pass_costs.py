"""Measured durations of forward passes, and the durations that follow for passes of other sizes.

A pass is a step of the rows that generate, a chunk of prompts, or both. The time of both together is that of the step,
and the time that a fused chunk adds to it.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from protocol.timing_profile import PassKind, PassSeconds

# Numbers of tokens per row of a step: its newest token and its draft. Width 1 is a plain step.
WIDTHS: Final = (1, 2, 4, 8, 16)
# Weights of a new time in the smoothed time. A pass is slower than usual for many reasons, and faster for few.
_FASTER_WEIGHT: Final = 0.6
_SLOWER_WEIGHT: Final = 0.3
# A time is dropped after this many steps, or chunks, without its size: contexts change, and a size that once was slow
# is not used, so it is not measured either.
_MAX_AGE_STEPS: Final = 512
_MAX_AGE_CHUNKS: Final = 24
# The time of a step that was measured less than this many steps ago needs no new measurement.
_FRESH_STEPS: Final = 64
# Times of an earlier start are dropped after _DOUBTS_MAX passes in a row that differ from them by the factor _DOUBT.
_DOUBT: Final = 2.0
_DOUBTS_MAX: Final = 2
# Assumed factor by which a pass takes longer when its tokens double beyond all measured sizes.
_UNTRIED_GROWTH: Final = 1.25
# Weight of the newest block in the average number of tokens that a block gives a row.
_TOKENS_WEIGHT: Final = 0.3


@dataclass(slots=True)
class Duration:
    """Smoothed seconds of passes, or drafts, of one size. `used` is the number of the newest of them, 0 for a time of
    an earlier start.

    The first pass of a shape may compile kernels, so a size follows the faster of its two newest passes, and is trusted
    after its second.
    """

    seconds: float
    newest: float
    used: int
    is_trusted: bool = False

    def observe(self, seconds: float, used: int) -> None:
        """Add the seconds of another pass with its number."""
        less = min(seconds, self.newest)
        weight = _FASTER_WEIGHT if less < self.seconds else _SLOWER_WEIGHT
        self.seconds += (weight if self.is_trusted else 1.0) * (less - self.seconds)
        self.newest, self.used, self.is_trusted = seconds, used, True


_Key = tuple[int, PassKind, int]
"""Band of contexts, kind of pass, and number of rows, which is 0 except for steps."""
_Sizes = dict[int, Duration]
"""Durations by width of a step, or by number of tokens of a chunk."""


class PassCosts:
    """Table of pass durations. The pacer writes it; the sizes of chunks and the widths of drafts follow from it.

    `band` is the band of contexts of the current tick; each band has its own times, because attention costs more with a
    longer context. `prompted` is the number of prompt tokens of the tick, whose chunks are of the kind `prompt_kind`.
    `recalled` are times of an earlier start. Owned by the engine thread.
    """

    def __init__(self, recalled: Iterable[PassSeconds] = ()) -> None:
        self.band = self.prompted = 0
        self.prompt_kind = PassKind.FUSED
        # Width of the newest step; width and rows of the newest block, which is a step with drafts; and the average
        # number of tokens that a block gave each row.
        self.width = self.block_width = self.block_rows = 1
        self.block_tokens = 1.0
        # Number of measured passes; of steps, and of chunks in each band.
        self.passes = 0
        self._counts: dict[int | None, int] = {}
        self._sizes: dict[_Key, _Sizes] = {}
        # For each key, the number of passes in a row that an earlier start's times mispredicted.
        self._doubts: dict[_Key, int] = {}
        for each in recalled:
            if each.rows == bucket(each.rows) and each.size == bucket(each.size):
                sizes = self._sizes.setdefault((each.band, each.kind, each.rows), {})
                sizes[each.size] = Duration(each.seconds, each.seconds, 0, True)

    def observe_step(self, rows: int, width: int, seconds: float, tokens: int = 0) -> None:
        """Record a step; `seconds` is 0.0 if unknown. `tokens` is the number of tokens that all rows together got."""
        self.width = width_of(width)
        if self.width > 1 and tokens:
            rate = _TOKENS_WEIGHT if self.block_width > 1 else 1.0
            self.block_tokens += rate * (tokens / rows - self.block_tokens)
            self.block_rows, self.block_width = rows, self.width
        self._observe(PassKind.STEP, rows, self.width, seconds)

    def observe_chunk(self, kind: PassKind, tokens: int, seconds: float) -> None:
        """Record the seconds of a chunk, or those that a fused chunk added to a step; 0.0 if unknown."""
        self._observe(kind, 0, bucket(tokens), seconds * bucket(tokens) / tokens)

    def _observe(self, kind: PassKind, rows: int, size: int, seconds: float) -> None:
        self.passes += 1
        group = None if kind is PassKind.STEP else self.band
        count = self._counts[group] = self._counts.get(group, 0) + 1
        age = _MAX_AGE_STEPS if group is None else _MAX_AGE_CHUNKS
        for (band, each, _), sizes in self._sizes.items():
            if (each is PassKind.STEP) == (group is None) and (group is None or band == group):
                _drop(sizes, lambda time: 0 < time.used < count - age)
        if seconds <= 0.0:
            return
        key = self.band, kind, bucket(rows)
        sizes = self._sizes.setdefault(key, {})
        self._doubt(key, size, seconds)
        known = sizes.get(size)
        if known is None:
            sizes[size] = Duration(seconds, seconds, count)
        else:
            known.observe(seconds, count)

    def _doubt(self, key: _Key, size: int, seconds: float) -> None:
        """Drop the times of an earlier start if they mislead."""
        sizes = self._sizes[key]
        recalled = {at: each.seconds for at, each in sizes.items() if not each.used}
        if not recalled:
            return
        # The time of another size is between as long and proportionally longer or shorter.
        nearest = min(recalled, key=lambda at: abs(math.log2(at / size)))
        low, high = sorted((recalled[nearest], recalled[nearest] * size / nearest))
        is_far = not low / _DOUBT <= seconds <= high * _DOUBT
        self._doubts[key] = self._doubts.get(key, 0) + 1 if is_far else 0
        if self._doubts[key] >= _DOUBTS_MAX:
            sizes.pop(size, None)
            for each in self._sizes.values():
                _drop(each, lambda time: not time.used)

    def step(self, rows: int, width: int) -> float | None:
        """Predict the seconds of a step; None if no plain step with about this many rows is known.

        An unmeasured width follows from the widest measured narrower one, and is assumed to cost as much more as the
        last doubling. The doubling from 1 to 2 does not count, because one token per row runs on other kernels.
        """
        points = dict(_trusted(self._sizes.get((self.band, PassKind.STEP, bucket(rows)), {}), has_plain=True))
        if 1 not in points:
            return None
        at = max(each for each in points if each <= width)
        growth = points[at] / points[at // 2] if at > 2 and at // 2 in points else _UNTRIED_GROWTH
        return points[at] * float(max(_UNTRIED_GROWTH, growth) ** math.log2(width / at))

    def scaled_step(self, rows: int, width: int) -> float:
        """Return the seconds of a step, estimated from the nearest known contexts and rows; 0.0 if none are known.

        Doubling the rows costs no time while reading the weights dominates, and at most doubles the time; the assumed
        factor is the square root of 2.
        """
        keys = [key for key, sizes in self._sizes.items() if key[1] is PassKind.STEP and width in sizes]
        if not keys:
            return 0.0
        nearest = min(keys, key=lambda key: (abs(key[0] - self.band), abs(math.log2(key[2] / rows))))
        return self._sizes[nearest][width].seconds * math.sqrt(bucket(rows) / nearest[2])

    def chunk(self, kind: PassKind, tokens: int) -> float | None:
        """Predict the seconds of a chunk, or those that a fused chunk adds; None if no chunk of this kind is known."""
        points = _trusted(self._chunks(kind))
        return _line(points, tokens) if points else None

    def reaches(self, kind: PassKind, tokens: int) -> bool:
        """Return whether half of this chunk was measured, so that a wrong prediction at most doubles the time."""
        return tokens <= 2 * max((at for at, _ in _trusted(self._chunks(kind))), default=0)

    def _chunks(self, kind: PassKind) -> _Sizes:
        """Return the durations of chunks in this band, or in the nearest band that has any."""
        bands = [key[0] for key, sizes in self._sizes.items() if key[1] is kind and sizes]
        return self._sizes[min(bands, key=lambda band: abs(band - self.band)), kind, 0] if bands else {}

    def has_step(self, rows: int, width: int, *, is_trusted: bool = False) -> bool:
        """Return whether a step of this size was measured in this band, and twice if `is_trusted` is set."""
        each = self._sizes.get((self.band, PassKind.STEP, bucket(rows)), {}).get(width_of(width))
        return each is not None and (each.is_trusted or not is_trusted)

    def is_fresh(self, rows: int, width: int) -> bool:
        """Return whether a step of this size was measured recently."""
        each = self._sizes.get((self.band, PassKind.STEP, bucket(rows)), {}).get(width_of(width))
        return each is not None and self._counts.get(None, 0) - each.used < _FRESH_STEPS

    def gain(self, rows: int, width: int, drafting_s: float = 0.0) -> float:
        """Return the tokens per second of blocks divided by those of plain steps; 0.0 if a time is unknown.

        The tokens per row are the average of recent blocks. `drafting_s` is the time to make the drafts of a block.
        """
        plain_s, block_s = self.scaled_step(rows, 1), self.scaled_step(rows, width)
        return self.block_tokens * plain_s / (block_s + drafting_s) if block_s else 0.0

    def records(self) -> list[PassSeconds]:
        """Return the times to keep for the next start."""
        return [
            PassSeconds(band, kind, rows, at, seconds)
            for (band, kind, rows), sizes in sorted(self._sizes.items())
            for at, seconds in _trusted(sizes, has_plain=kind is PassKind.STEP)
            if kind is not PassKind.READING
        ]


def width_of(width: int) -> int:
    """Return the smallest of `WIDTHS` that is not less than `width`."""
    return next((each for each in WIDTHS if each >= width), WIDTHS[-1])


def bucket(number: int) -> int:
    """Return the nearest power of two; 0 stays as it is."""
    return 1 << round(math.log2(number)) if number else 0


def _drop(sizes: _Sizes, is_dropped: Callable[[Duration], bool]) -> None:
    for at in [at for at, each in sizes.items() if is_dropped(each)]:
        del sizes[at]


def _trusted(sizes: _Sizes, *, has_plain: bool = False) -> list[tuple[int, float]]:
    """Return sizes and their seconds in order, without those that were measured once, if there are others. Plain steps
    compile little, so with `has_plain` width 1 is among them.
    """
    points = sorted((at, each.seconds) for at, each in sizes.items() if each.is_trusted or (has_plain and at == 1))
    return points or sorted((at, each.seconds) for at, each in sizes.items())


def _line(points: list[tuple[int, float]], tokens: int) -> float:
    """Return the seconds at `tokens` of the line through these points, which is extended at both ends."""
    first, first_s = points[0]
    last, last_s = points[-1]
    if tokens <= first:
        slope = (points[1][1] - first_s) / (points[1][0] - first) if len(points) > 1 else first_s / first
        return min(max(first_s - slope * (first - tokens), first_s * tokens / first), first_s)
    for (low, low_s), (high, high_s) in pairwise(points):
        if tokens <= high:
            return low_s + (high_s - low_s) * (tokens - low) / (high - low)
    if len(points) == 1:
        return last_s * float(_UNTRIED_GROWTH ** math.log2(tokens / last))
    before, before_s = points[-2]
    return last_s + max(0.0, (last_s - before_s) / (last - before)) * (tokens - last)
