"""Prefill chunk size: the number of prompt tokens that a tick may process while streams are running."""

import math
from dataclasses import dataclass, field
from typing import Final

from protocol.timing_profile import CONTEXTS, band_of
from worker.engine.scheduling.learned import LearnedTimes
from worker.engine.scheduling.pass_time import PassTime
from worker.speculation.policy.draft_width import StepCosts, bucket

# Chunk sizes are powers of two from this number of tokens on, so that few shapes are ever compiled.
MIN_CHUNK: Final = 8
# Chunk size beside running streams while no times are known.
FIRST_CHUNK: Final = 32
# A tick with prefill may last GENTLE_RATIO times as long as a tick without prefill if ENOUGH prompt tokens fit into
# that time, else STALL_RATIO times as long.
GENTLE_RATIO: Final = 1.4
ENOUGH: Final = 128
STALL_RATIO: Final = 2.2
# The permitted stall is proportional to the time of a step. A verify block counts as the plain steps that it replaces,
# but as at most this many blocks, and as at most one block per waiting prompt, so that the time between two events of a
# stream stays bounded.
STALL_BLOCKS: Final = 2
# Each further waiting prompt per running stream lengthens the permitted stall by this many times its own length.
CROWD: Final = 2
# A stall that is shorter than this is not noticeable, and is always allowed.
MIN_STALL_S: Final = 0.003
# A prompt of at most this many tokens may stall streams for longer, because it does so only once or twice, and a full
# batch gains more than that costs. The end of a long prompt may not, because that prompt has already slowed the streams
# for long.
SHORT_PROMPT: Final = 256
SHORT_PROMPT_FACTOR: Final = 2.5
# A tick of prefill without running streams takes about this long, so that commands are handled in between.
IDLE_TICK_S: Final = 0.25
# With several prompts, one of them long, a tick takes this long instead, so that short prompts do not wait long.
SHARED_TICK_S: Final = 0.1
# Two passes replace a fused one only if they take at most this part of its time.
_MARGIN: Final = 0.9
# If the smallest chunk exceeds the limit, a larger chunk that takes at most this many times as long is used, because
# fewer chunks are then needed.
_NO_DEARER: Final = 1.25
# Weights of a new time in the smoothed time, if it is faster and if it is slower. The first time of a size may include
# compiling kernels.
_QUICKER: Final = 0.7
_SLOWER: Final = 0.4
# Times of a size that was not used for this many chunks are dropped, because they may come from another length of
# context.
_MEMORY: Final = 24
# Times of earlier starts are dropped after _DOUBTS chunks in a row that took _DOUBT times as long: the machine is busy,
# or the file is wrong.
_DOUBT: Final = 1.5
_DOUBTS: Final = 2
# Metal ends a process whose dispatch of attention runs for about five seconds. So tokens × context is at most this,
# except for chunks of at most WATCHDOG_LEAST tokens in all.
WATCHDOG: Final = 512 * 65_536
WATCHDOG_LEAST: Final = 64


@dataclass(slots=True)
class PaceLimits:
    """Limits of a tick on a desktop: its seconds, and its prompt tokens per row; 0 means no limit."""

    tick_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True, frozen=True)
class ChunkPlan:
    """Number of prompt tokens of each prefilling row in a tick, and whether they share one pass with the decode
    step."""

    tokens: int
    is_fused: bool = True


@dataclass(slots=True)
class _Times:
    """Seconds that a chunk adds to a tick, by the chunk's number of tokens, which is a power of two.

    The first chunk of a shape may compile kernels, which takes as long as many steps. So a size's time follows the
    smaller of its two newest measurements, and a time that was measured only once is used only if no other is known.
    """

    seconds: dict[int, float] = field(default_factory=dict[int, float])
    _newest: dict[int, float] = field(default_factory=dict[int, float])
    _once: set[int] = field(default_factory=set[int])
    # For each size, its time divided by the time of half the size; ratios stay when times are dropped.
    _ratios: dict[int, float] = field(default_factory=dict[int, float])
    # For each size, the serial number of its newest chunk; fused and separate chunks share one numbering.
    _used: dict[int, int] = field(default_factory=dict[int, int])
    # Sizes whose times come from earlier starts, and the number of chunks in a row that took much longer than known
    # times.
    _kept: set[int] = field(default_factory=set[int])
    _doubts: int = 0

    def recall(self, kept: dict[int, float]) -> None:
        """Use times of earlier starts until measurements contradict them."""
        self.seconds.update(kept)
        self._newest.update(kept)
        self._used.update(dict.fromkeys(kept, 0))
        self._kept.update(kept)

    def observe(self, tokens: int, seconds: float, chunk: int) -> float:
        """Learn the time of a chunk. Return that time scaled to the power of two nearest to `tokens`."""
        size = bucket(tokens)
        time = seconds * size / tokens
        if self._kept:
            self._doubt(size, time)
        before = self._newest.get(size)
        self._newest[size], self._used[size] = time, chunk
        if before is None:
            self.seconds[size] = time
            self._once.add(size)
            return time
        less = min(time, before)
        self.seconds[size] = less if size in self._once else _smooth(self.seconds[size], less)
        self._once.discard(size)
        if size // 2 in self._known():
            self._ratios[size] = min(max(1.0, self.seconds[size] / self.seconds[size // 2]), 2.0)
        return time

    def _doubt(self, size: int, time: float) -> None:
        self._doubts = self._doubts + 1 if time > _DOUBT * self.seconds.get(size, time) else 0
        self._kept.discard(size)
        if self._doubts >= _DOUBTS:
            for kept in self._kept:
                self._drop(kept)
            self._kept.clear()

    def forget(self, chunk: int) -> None:
        for stale in [at for at, used in self._used.items() if chunk - used > _MEMORY]:
            self._drop(stale)
            self._kept.discard(stale)

    def _drop(self, size: int) -> None:
        del self.seconds[size], self._newest[size], self._used[size]
        self._once.discard(size)

    def predict(self, tokens: int) -> float:
        """Predict the seconds of a number of tokens from the nearest known size.

        Twice the tokens of a known size are assumed to cost no more until they are measured, because a chunk has a
        fixed cost.
        """
        size = bucket(tokens)
        known = self._known() or self.seconds.keys()
        nearest = min(known, key=lambda at: (abs(math.log2(at / size)), -at))
        time, doublings = self.seconds[nearest], round(math.log2(size / nearest))
        if doublings <= 0:
            return time * 2.0**doublings
        half, ratio = nearest // 2, self._ratios.get(2 * nearest, 1.0)
        if half in known:  # the line through the times of both sizes
            ratio = max(ratio, min(2.0, 3 - 2 * self.seconds[half] / time))
        return time * ratio * 2.0 ** (doublings - 1)

    def reaches(self, tokens: int) -> bool:
        """Whether half of this number of tokens was measured, so that a wrong prediction at most doubles the time."""
        return bucket(tokens) <= 2 * max(self._known() or self.seconds)

    def certain(self, tokens: int) -> float:
        """Return the seconds of a number of tokens if their size is known, else 0."""
        size = bucket(tokens)
        return self.seconds[size] if size in self._known() else 0.0

    def _known(self) -> set[int]:
        return self.seconds.keys() - self._once


@dataclass(slots=True)
class _Band:
    """Times of fused and separate chunks at the contexts of one band, and the number of chunks observed in that
    band."""

    fused: _Times = field(default_factory=_Times)
    apart: _Times = field(default_factory=_Times)
    chunks: int = 0


class ChunkPolicy:
    """Sizes prefill chunks by measured time, so that a long prompt slows running streams by a bounded ratio.

    A chunk has a fixed cost besides that of its tokens, so times are kept by size: a size is used if its known time
    fits; an unmeasured size is tried if the time that half the size predicts for it fits. Decode is never starved: a
    tick has one decode step and at most one chunk per prefilling row. Prefill is never starved: the chunk has a
    minimum. Fused chunks and chunks with passes of their own are measured separately, and the faster way is chosen.
    Attention costs more with a longer context, so each band of contexts has its own times.
    """

    def __init__(
        self,
        max_chunk: int,
        costs: StepCosts | None = None,
        *,
        is_fixed: bool = False,
        has_watchdog: bool = False,
        can_fuse: bool = True,
        learned: LearnedTimes | None = None,
    ) -> None:
        """`costs` is the table of step times, which `observe` writes.

        With `is_fixed` every chunk has `max_chunk` tokens, except at the end of a prompt, regardless of time. With
        `has_watchdog` a chunk is also bounded by its context, for Metal's watchdog. `learned` has the times of earlier
        starts and records those of this one. Without `can_fuse` chunks have forward passes of their own.
        """
        self.pace = PaceLimits()
        self._max = max_chunk
        self._is_fixed = is_fixed
        self._has_watchdog = has_watchdog
        self._can_fuse = can_fuse
        self._learned = learned or LearnedTimes()
        self._costs = costs or StepCosts()
        self._band = 0
        self._bands = [_Band() for _ in range(len(CONTEXTS) + 1)]
        # Whether half of a tick's time for prefill is reserved for a sparse prompt that a draft model reads.
        self.is_shared = False
        for band, times in enumerate(self._bands):
            times.fused.recall(self._learned.chunks(band, is_riding=True))
            times.apart.recall(self._learned.chunks(band, is_riding=False))
        self._costs.recall(self._learned.steps())

    def chunk(self, prefilling: int, decoding: int, longest: int = SHORT_PROMPT + 1, context: int = 0) -> ChunkPlan:
        """Return the plan of the next tick. `longest` is the length of the longest prompt, `context` the longest
        context of a row."""
        self._band = band_of(context)
        most = self._most(prefilling, context)
        if prefilling == 0 or self._is_fixed:
            return ChunkPlan(most)
        apart = self._sized(False, prefilling, decoding, longest)
        riding = self._sized(True, prefilling, decoding, longest)
        if not decoding:
            return ChunkPlan(min(most, apart or riding or most), is_fused=False)
        if not self._can_fuse:
            return ChunkPlan(min(most, apart or FIRST_CHUNK), is_fused=False)
        if not self._costs.is_fresh(decoding, self._costs.newest[1]):  # with a separate chunk, the step is measured
            known = [each for each in (apart, riding) if each is not None] or [FIRST_CHUNK]
            return ChunkPlan(min(most, *known), is_fused=False)
        if riding is None or apart is None:  # a fused chunk is assumed to be no slower
            return ChunkPlan(min(most, riding or apart or FIRST_CHUNK))
        paces = (
            size / max(self._times(is_riding).predict(size * prefilling), 1e-9)
            for is_riding, size in ((True, riding), (False, apart))
        )
        is_fused = next(paces) >= _MARGIN * next(paces)
        # Times of separate passes may come from prompts that ran alone, with a shorter context.
        return ChunkPlan(min(most, riding if is_fused else min(apart, 2 * riding)), is_fused=is_fused)

    def selection_s(self, prefilling: int, decoding: int) -> float:
        """Return the seconds for the token selection of a sparse prefill in the next tick; `prefilling` counts the
        other prompts."""
        self.is_shared = prefilling > 0
        return self._limit_s(1 if decoding else prefilling + 1, decoding, SHORT_PROMPT + 1)

    def observe(self, each: PassTime) -> None:
        """Learn from a forward pass."""
        step_s, chunk_s = self._split(each)
        if each.rows:
            self._costs.observe(each.rows, each.width, step_s, each.tokens)
        if not each.prompted:
            self._learned.stepped(self._band, each.rows, each.width, step_s)
            return
        band = self._bands[self._band]
        band.chunks += 1
        if chunk_s > 0:
            time = (band.fused if each.rows else band.apart).observe(each.prompted, chunk_s, band.chunks)
            self._learned.chunked(self._band, each.prompted, time, is_riding=each.rows > 0)
        band.fused.forget(band.chunks)
        band.apart.forget(band.chunks)

    def _split(self, each: PassTime) -> tuple[float, float]:
        """Return the seconds of the step and of the chunk of a pass; 0.0 if unknown.

        The time of a chunk is that of its fused pass minus the known time of an equal step. If the step is unknown, its
        time is that of the pass minus the known time of an equal chunk, if that chunk takes less than half of the pass.
        Otherwise that time stays unknown, because it would be a small difference of long times.
        """
        if not each.rows or not each.prompted:
            return (each.seconds, 0.0) if each.rows else (0.0, each.seconds)
        step_s = self._costs.known(each.rows, each.width)
        if step_s is not None:
            return 0.0, each.seconds - step_s
        chunk_s = self._bands[self._band].fused.certain(each.prompted)
        return (each.seconds - chunk_s if 0.0 < chunk_s < each.seconds / 2 else 0.0), 0.0

    def _times(self, is_riding: bool) -> _Times:
        """Return the times of fused or separate chunks in this band, or in the nearest band that has any."""
        times = [band.fused if is_riding else band.apart for band in self._bands]
        known = [at for at, each in enumerate(times) if each.seconds]
        return times[min(known, key=lambda at: (abs(at - self._band), at), default=self._band)]

    def _most(self, prefilling: int, context: int) -> int:
        """Return the largest permitted chunk, a power of two if the watchdog bounds it."""
        most = self._max
        if self.pace.tokens and not self._is_fixed:
            most = min(most, self.pace.tokens)
        if self._has_watchdog and prefilling and context:
            tokens = max(WATCHDOG // context, WATCHDOG_LEAST) // prefilling
            most = min(most, max(MIN_CHUNK, 1 << max(0, tokens.bit_length() - 1)))
        return most

    def _sized(self, is_riding: bool, prefilling: int, decoding: int, longest: int) -> int | None:
        """Return the largest chunk whose time fits; None if no time is known."""
        times = self._times(is_riding)
        if not times.seconds:
            return None
        limit_s = self._limit_s(prefilling, decoding, longest)
        if decoding and is_riding:
            gentle = self._fitting(times, prefilling, decoding, limit_s * (GENTLE_RATIO - 1) / (STALL_RATIO - 1))
            if gentle * prefilling >= ENOUGH or gentle >= longest:
                return gentle
        return self._fitting(times, prefilling, decoding, limit_s)

    def _fitting(self, times: _Times, prefilling: int, decoding: int, limit_s: float) -> int:
        limit_s = max(limit_s, _NO_DEARER * times.certain(MIN_CHUNK * prefilling))
        size = MIN_CHUNK
        while size < self._max and times.predict(2 * size * prefilling) <= limit_s:
            if decoding and not times.reaches(2 * size * prefilling):
                break
            size *= 2
        return min(size, self._max)

    def _limit_s(self, prefilling: int, decoding: int, longest: int) -> float:
        limit_s = self._patience_s(prefilling, decoding, longest)
        return min(limit_s, self.pace.tick_s) if self.pace.tick_s else limit_s

    def _patience_s(self, prefilling: int, decoding: int, longest: int) -> float:
        is_short = longest <= SHORT_PROMPT
        factor = SHORT_PROMPT_FACTOR if is_short else 1.0
        if not decoding:
            return factor * (IDLE_TICK_S if prefilling == 1 or is_short else SHARED_TICK_S)
        return factor * self._stall_s(prefilling, decoding) / (2 if self.is_shared else 1)

    def _stall_s(self, prefilling: int, decoding: int) -> float:
        """Return the seconds that a chunk may add to the next step of rows that generate.

        The bound is per generated token, which may be delayed by one plain step. A block that gives four tokens may be
        delayed by four plain steps, even if the block takes only two.
        """
        width = self._costs.newest[1]
        gain = self._costs.gain(decoding, width) or 1.0 if width > 1 else 1.0
        step_s = self._costs.scaled(decoding, width) * min(gain, prefilling, STALL_BLOCKS)
        # Many waiting prompts gain more from full batches than a few streams lose by a longer stall.
        crowd = 1 + CROWD * (prefilling - 1) / decoding
        return max((STALL_RATIO - 1) * step_s * crowd, MIN_STALL_S)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + (_QUICKER if new < old else _SLOWER) * (new - old)
