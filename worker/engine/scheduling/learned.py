"""Times of steps and chunks that were measured in this run of the worker and in earlier ones, saved for the next
run."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from protocol.timing_profile import ChunkTime, StepTime, TimingProfile
from worker.speculation.policy.draft_width import bucket, width_of

# This many of the newest times of each size are held in memory, and their first quartile is saved, because a hot or
# busy machine predicts nothing about the next start.
_HELD_TIMES: Final = 16
_QUANTILES: Final = 4
# Times of earlier starts are doubted if the median of JUDGED_TICKS ticks differs by more than DOUBT_FACTOR.
JUDGED_TICKS: Final = 50
DOUBT_FACTOR: Final = 1.5
# A faster new time replaces a kept time; a slower one moves the kept time by this part of the difference.
_SLOWER_WEIGHT: Final = 0.3
_MAX_TIME_S: Final = 600.0

_Key = TypeVar("_Key", tuple[int, bool, int], tuple[int, int, int])
_Chunks = dict[tuple[int, bool, int], float]
_Steps = dict[tuple[int, int, int], float]


class _Held:
    """Newest times of steps or chunks of one size, in seconds."""

    __slots__ = ("_count", "_times")

    def __init__(self) -> None:
        self._times = array("d", bytes(8 * _HELD_TIMES))
        self._count = 0

    def add(self, seconds: float) -> None:
        self._times[self._count % _HELD_TIMES] = seconds
        self._count += 1

    @property
    def best(self) -> float:
        """First quartile of the times."""
        times = sorted(self._times[: min(self._count, _HELD_TIMES)])
        return times[len(times) // _QUANTILES]


class LearnedTimes:
    """Times of steps and chunks. `kept` has those that were read from disk, and `merged` returns those to write to
    disk. Only the engine thread uses this object."""

    def __init__(self, kept: TimingProfile | None = None) -> None:
        self._kept_chunks: _Chunks = {}
        self._kept_steps: _Steps = {}
        self._doubts = 0
        if kept is not None:
            self._doubts = kept.doubts
            self._kept_chunks = {(each.band, each.is_riding, each.tokens): each.seconds for each in kept.chunks}
            self._kept_steps = {(each.band, each.rows, each.width): each.seconds for each in kept.steps}
        self._chunks: defaultdict[tuple[int, bool, int], _Held] = defaultdict(_Held)
        self._steps: defaultdict[tuple[int, int, int], _Held] = defaultdict(_Held)
        # Times of the newest ticks, divided by the kept times of the same sizes.
        self._ratios = array("d", bytes(8 * JUDGED_TICKS))
        self._judged = 0
        self.ticks = 0

    def chunks(self, band: int, *, is_riding: bool) -> dict[int, float]:
        """Return the kept seconds of chunks by their number of tokens, which is a power of two."""
        return {
            tokens: seconds
            for (at, is_fused, tokens), seconds in self._kept_chunks.items()
            if at == band and is_fused is is_riding and not tokens & (tokens - 1)
        }

    def steps(self) -> dict[tuple[int, int], float]:
        """Return the kept seconds of steps by number of rows and width, each from the shortest context for which a time
        is known."""
        return {(rows, width): seconds for (_, rows, width), seconds in sorted(self._kept_steps.items(), reverse=True)}

    def chunked(self, band: int, tokens: int, seconds: float, *, is_riding: bool) -> None:
        """Learn the seconds that a chunk of about `tokens` tokens has added to a tick."""
        key = band, is_riding, bucket(tokens)
        self._chunks[key].add(seconds)
        self._judge(seconds, self._kept_chunks.get(key, 0.0))

    def stepped(self, band: int, rows: int, width: int, seconds: float) -> None:
        """Learn the seconds of a step of `width` tokens per row, without prompts."""
        key = band, bucket(rows), width_of(width)
        self._steps[key].add(seconds)
        self._judge(seconds, self._kept_steps.get(key, 0.0))

    def _judge(self, seconds: float, kept: float) -> None:
        self.ticks += 1
        if kept:
            self._ratios[self._judged % JUDGED_TICKS] = seconds / kept
            self._judged += 1

    @property
    def is_doubted(self) -> bool:
        """Whether kept times differ much from the times of this start."""
        if self._judged < JUDGED_TICKS:
            return False
        middle = sorted(self._ratios)[JUDGED_TICKS // 2]
        return not 1 / DOUBT_FACTOR <= middle <= DOUBT_FACTOR

    def merged(self) -> tuple[list[ChunkTime], list[StepTime], int]:
        """Return the times to keep, and 1 if they are doubted, else 0.

        Kept times are dropped if this start and the previous one both doubted them. After a first doubt they stay,
        because a hot or busy machine predicts nothing about the next start.
        """
        chunks = {key: held.best for key, held in self._chunks.items()}
        steps = {key: held.best for key, held in self._steps.items()}
        if self.is_doubted and self._doubts:
            merged, doubts = (chunks, steps), 0
        elif self.is_doubted:
            merged, doubts = (chunks | self._kept_chunks, steps | self._kept_steps), 1
        else:
            # A start that was too short to judge leaves the doubts unchanged.
            doubts = 0 if self._judged >= JUDGED_TICKS else self._doubts
            merged = _followed(self._kept_chunks, chunks), _followed(self._kept_steps, steps)
        return (
            [ChunkTime(*key, seconds) for key, seconds in _plausible(merged[0].items())],
            [StepTime(*key, seconds) for key, seconds in _plausible(merged[1].items())],
            doubts,
        )


def _followed(kept: Mapping[_Key, float], seen: Mapping[_Key, float]) -> dict[_Key, float]:
    merged = dict(kept)
    for key, seconds in seen.items():
        old = kept.get(key, seconds)
        merged[key] = seconds if seconds <= old else old + _SLOWER_WEIGHT * (seconds - old)
    return merged


def _plausible(times: Iterable[tuple[_Key, float]]) -> list[tuple[_Key, float]]:
    """Return the times that are accepted when the file is read, in order."""
    return sorted((key, seconds) for key, seconds in times if 0 < seconds <= _MAX_TIME_S)
