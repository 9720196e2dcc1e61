"""Learned times: those of earlier starts, and those of this one that are kept for the next."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final, TypeVar

from protocol.timing_profile import ChunkTime, StepTime, TimingProfile
from worker.speculation.policy.draft_width import bucket, width_of

# Times of one size that are held, the newest ones; what is kept of them is the end of the quickest quarter, because a
# machine that is hot, or that others use, says nothing of the next start.
_HELD: Final = 16
_PART: Final = 4
# Ticks of which the times of earlier starts are judged: they are doubted where the middle one took so many times what
# was kept, or so many times less.
JUDGED: Final = 50
DOUBTED: Final = 1.5
# Kept times follow what got quicker at once and what got slower slowly.
_SLOWER: Final = 0.3
_LONGEST_S: Final = 600.0

_Key = TypeVar("_Key", tuple[int, bool, int], tuple[int, int, int])
_Chunks = dict[tuple[int, bool, int], float]
_Steps = dict[tuple[int, int, int], float]


class _Held:
    """The newest times of one size."""

    __slots__ = ("_count", "_times")

    def __init__(self) -> None:
        self._times = array("d", bytes(8 * _HELD))
        self._count = 0

    def add(self, seconds: float) -> None:
        self._times[self._count % _HELD] = seconds
        self._count += 1

    @property
    def best(self) -> float:
        """The end of the quickest quarter."""
        times = sorted(self._times[: min(self._count, _HELD)])
        return times[len(times) // _PART]


class LearnedTimes:
    """Owned by the engine thread. `kept` is what was found on disk; `merged` is what is to be written there."""

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
        # Times ÷ those that were kept, of the newest ticks.
        self._ratios = array("d", bytes(8 * JUDGED))
        self._judged = 0
        self.ticks = 0

    def chunks(self, band: int, *, is_riding: bool) -> dict[int, float]:
        """Seconds by tokens, a power of two each, as they were kept."""
        return {
            tokens: seconds
            for (at, rode, tokens), seconds in self._kept_chunks.items()
            if at == band and rode is is_riding and not tokens & (tokens - 1)
        }

    def steps(self) -> dict[tuple[int, int], float]:
        """Seconds of steps by rows and width, as they were kept, at the shortest context that each is known for."""
        return {(rows, width): seconds for (_, rows, width), seconds in sorted(self._kept_steps.items(), reverse=True)}

    def chunked(self, band: int, tokens: int, seconds: float, *, is_riding: bool) -> None:
        """A chunk of about so many tokens has added so much to a tick."""
        key = band, is_riding, bucket(tokens)
        self._chunks[key].add(seconds)
        self._judge(seconds, self._kept_chunks.get(key, 0.0))

    def stepped(self, band: int, rows: int, width: int, seconds: float) -> None:
        """A step of so many tokens a row, without prompts, has taken so long."""
        key = band, bucket(rows), width_of(width)
        self._steps[key].add(seconds)
        self._judge(seconds, self._kept_steps.get(key, 0.0))

    def _judge(self, seconds: float, kept: float) -> None:
        self.ticks += 1
        if kept:
            self._ratios[self._judged % JUDGED] = seconds / kept
            self._judged += 1

    @property
    def is_doubted(self) -> bool:
        """Whether what was kept is far from what this start has seen."""
        if self._judged < JUDGED:
            return False
        middle = sorted(self._ratios)[JUDGED // 2]
        return not 1 / DOUBTED <= middle <= DOUBTED

    def merged(self) -> tuple[list[ChunkTime], list[StepTime], int]:
        """Times to keep, and doubts.

        Where this start and the one before it have both seen other times, what was kept is dropped; at a first doubt it
        stays as it was, for a hot or busy machine says nothing of the next start.
        """
        chunks = {key: held.best for key, held in self._chunks.items()}
        steps = {key: held.best for key, held in self._steps.items()}
        if self.is_doubted and self._doubts:
            merged, doubts = (chunks, steps), 0
        elif self.is_doubted:
            merged, doubts = (chunks | self._kept_chunks, steps | self._kept_steps), 1
        else:
            # A start that was too short for a judgement leaves the doubts as they were.
            doubts = 0 if self._judged >= JUDGED else self._doubts
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
        merged[key] = seconds if seconds <= old else old + _SLOWER * (seconds - old)
    return merged


def _plausible(times: Iterable[tuple[_Key, float]]) -> list[tuple[_Key, float]]:
    """Those that a reader takes, in order."""
    return sorted((key, seconds) for key, seconds in times if 0 < seconds <= _LONGEST_S)
