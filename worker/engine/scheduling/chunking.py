"""Prefill chunk size: the tokens of prompts that a tick may process beside the running streams."""

import math
from dataclasses import dataclass, field
from typing import Final

from protocol.timing_profile import CONTEXTS, band_of
from worker.engine.scheduling.learned import LearnedTimes
from worker.engine.scheduling.pass_time import PassTime
from worker.speculation.policy.draft_width import StepCosts, bucket

# Chunks are powers of two from here, so that few shapes are ever compiled.
MIN_CHUNK: Final = 8
# Where nothing is known yet and others would have to wait.
FIRST_CHUNK: Final = 32
# A tick that also prefills may last this many times its own step, if as many prompt tokens as are enough find a place
# in it …
GENTLE_RATIO: Final = 1.4
ENOUGH: Final = 128
# … or else this many times …
STALL_RATIO: Final = 2.2
# … where a block counts as the plain steps that its tokens would take: as no more than so many blocks, and for one
# waiting prompt as one, so that the time between two events of a stream stays bounded …
STALL_BLOCKS: Final = 2
# … and where each further prompt that waits for each stream that runs lets the tick stall this many times longer …
CROWD: Final = 2
# … unless that step is so short that it is not noticeable.
MIN_STALL_S: Final = 0.003
# A short prompt may stall longer: once or twice, and a full batch is worth more than it costs. Not so the end of a long
# one: it would be the worst for those who have waited in small steps all along.
SHORT_PROMPT: Final = 256
SHORT_PROMPT_FACTOR: Final = 2.5
# Alone, prefill runs in ticks of about this long, so that commands are seen in between.
IDLE_TICK_S: Final = 0.25
# Several prompts and a long one among them: the short ones should not wait long for it.
SHARED_TICK_S: Final = 0.1
# Leave the one forward pass for two only where these take this part of its time.
_MARGIN: Final = 0.9
# Where the least chunk takes longer than it may, one that takes this many times as long at most is no worse, and fewer
# of them are needed.
_NO_DEARER: Final = 1.25
# Times follow what gets quicker at once and what gets slower slowly: the first of a size may have compiled kernels.
_QUICKER: Final = 0.7
_SLOWER: Final = 0.4
# A size that was not used for this many chunks is forgotten: its time was another context's, or an accident.
_MEMORY: Final = 24
# Times of earlier starts are dropped when so many chunks in a row took this many times as long: others hold the
# machine, or the file lies.
_DOUBT: Final = 1.5
_DOUBTS: Final = 2
# Metal ends a process whose one dispatch of attention runs for some five seconds: tokens × context stay below this,
# but for chunks of so few tokens in all.
WATCHDOG: Final = 512 * 65_536
WATCHDOG_LEAST: Final = 64


@dataclass(slots=True)
class PaceLimits:
    """Limits of a desktop on what a tick may submit: seconds, and prompt tokens of a row; 0 is none."""

    tick_s: float = 0.0
    tokens: int = 0


@dataclass(slots=True, frozen=True)
class ChunkPlan:
    """Prompt tokens for each prefilling row in a tick, and whether they ride on its step: in one forward pass."""

    tokens: int
    is_fused: bool = True


@dataclass(slots=True)
class _Times:
    """Seconds that a number of prompt tokens, a power of two, adds to a tick.

    The first chunk of a shape may compile kernels, which takes as long as many steps. So a time counts as the smaller
    of the two newest, and one that was seen once only where no other is known.
    """

    seconds: dict[int, float] = field(default_factory=dict[int, float])
    _newest: dict[int, float] = field(default_factory=dict[int, float])
    _once: set[int] = field(default_factory=set[int])
    # What a size took, of the time of half of it; kept when times are forgotten.
    _ratios: dict[int, float] = field(default_factory=dict[int, float])
    # The newest chunk of each size, counted over both ways.
    _used: dict[int, int] = field(default_factory=dict[int, int])
    # Sizes whose times are of earlier starts, and chunks in a row that took much longer.
    _kept: set[int] = field(default_factory=set[int])
    _doubts: int = 0

    def recall(self, kept: dict[int, float]) -> None:
        """Take times of earlier starts, for as long as nothing speaks against them."""
        self.seconds.update(kept)
        self._newest.update(kept)
        self._used.update(dict.fromkeys(kept, 0))
        self._kept.update(kept)

    def observe(self, tokens: int, seconds: float, chunk: int) -> float:
        """Take the time of a chunk; returns that of the next power of two."""
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
        """Seconds for that many tokens, from the nearest size that is known.

        Twice the tokens are hoped to cost no more until it was tried: a chunk has a cost of its own.
        """
        size = bucket(tokens)
        known = self._known() or self.seconds.keys()
        nearest = min(known, key=lambda at: (abs(math.log2(at / size)), -at))
        time, doublings = self.seconds[nearest], round(math.log2(size / nearest))
        if doublings <= 0:
            return time * 2.0**doublings
        half, ratio = nearest // 2, self._ratios.get(2 * nearest, 1.0)
        if half in known:  # the line through the two
            ratio = max(ratio, min(2.0, 3 - 2 * self.seconds[half] / time))
        return time * ratio * 2.0 ** (doublings - 1)

    def reaches(self, tokens: int) -> bool:
        """Whether half of that many tokens were tried: beside streams a mistaken hope costs no more than a doubling."""
        return bucket(tokens) <= 2 * max(self._known() or self.seconds)

    def certain(self, tokens: int) -> float:
        """Seconds for that many tokens if their size is known, else 0."""
        size = bucket(tokens)
        return self.seconds[size] if size in self._known() else 0.0

    def _known(self) -> set[int]:
        return self.seconds.keys() - self._once


@dataclass(slots=True)
class _Band:
    """Times at contexts of one band, on the step and apart, and chunks that were observed there."""

    fused: _Times = field(default_factory=_Times)
    apart: _Times = field(default_factory=_Times)
    chunks: int = 0


class ChunkPolicy:
    """Sizes prefill chunks by measured time, so that a long prompt slows running streams by a bounded ratio.

    A chunk has a cost of its own beside that of its tokens, so times are kept by size: a size is used when its time
    fits, and tried when half of it took so little that it may. Decode is never starved: a tick holds one decode step
    and at most one chunk per prefilling row. Prefill is never starved: the chunk has a minimum. Chunks that ride on the
    step and those in forward passes of their own are measured apart, and the quicker way is taken. Attention costs more
    the longer the context is, so each band of contexts has times of its own.
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

        With `is_fixed` every chunk has `max_chunk` tokens, but for the end of a prompt: time decides nothing.

        With `has_watchdog` a chunk is also bounded by its context, as Metal asks for. `learned` has the times of
        earlier starts and takes those of this one. Without `can_fuse` chunks have forward passes of their own.
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
        # Half of what a tick may take beside its step is for a prompt that a draft model reads.
        self.is_shared = False
        for band, times in enumerate(self._bands):
            times.fused.recall(self._learned.chunks(band, is_riding=True))
            times.apart.recall(self._learned.chunks(band, is_riding=False))
        self._costs.recall(self._learned.steps())

    def chunk(self, prefilling: int, decoding: int, longest: int = SHORT_PROMPT + 1, context: int = 0) -> ChunkPlan:
        """For the next tick. `longest` is what the longest prompt has in all, `context` the most tokens that a row has
        already."""
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
        if not self._costs.is_fresh(decoding, self._costs.newest[1]):  # apart, the step is measured for itself
            known = [each for each in (apart, riding) if each is not None] or [FIRST_CHUNK]
            return ChunkPlan(min(most, *known), is_fused=False)
        if riding is None or apart is None:  # riding is hoped to be no slower
            return ChunkPlan(min(most, riding or apart or FIRST_CHUNK))
        paces = (
            size / max(self._times(is_riding).predict(size * prefilling), 1e-9)
            for is_riding, size in ((True, riding), (False, apart))
        )
        is_fused = next(paces) >= _MARGIN * next(paces)
        # Times of passes of their own may be of prompts that ran alone, at a shorter context.
        return ChunkPlan(min(most, riding if is_fused else min(apart, 2 * riding)), is_fused=is_fused)

    def choosing_s(self, prefilling: int, decoding: int) -> float:
        """Seconds of the next tick for a prompt that a draft model reads to choose of it, beside others in prefill."""
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
        """Seconds of the step and of the chunk of a pass; 0.0 is what it does not say.

        A fused one says what the chunk has added to a step of the same rows and width, or, where that is unknown, what
        the step beside such a chunk has taken. A small difference of two long times says nothing.
        """
        if not each.rows or not each.prompted:
            return (each.seconds, 0.0) if each.rows else (0.0, each.seconds)
        step_s = self._costs.known(each.rows, each.width)
        if step_s is not None:
            return 0.0, each.seconds - step_s
        chunk_s = self._bands[self._band].fused.certain(each.prompted)
        return (each.seconds - chunk_s if 0.0 < chunk_s < each.seconds / 2 else 0.0), 0.0

    def _times(self, is_riding: bool) -> _Times:
        """Those of this band, or of the nearest one that has any."""
        times = [band.fused if is_riding else band.apart for band in self._bands]
        known = [at for at, each in enumerate(times) if each.seconds]
        return times[min(known, key=lambda at: (abs(at - self._band), at), default=self._band)]

    def _most(self, prefilling: int, context: int) -> int:
        """The longest chunk that may be at all: a power of two below the maximum where something else bounds it."""
        most = self._max
        if self.pace.tokens and not self._is_fixed:
            most = min(most, self.pace.tokens)
        if self._has_watchdog and prefilling and context:
            tokens = max(WATCHDOG // context, WATCHDOG_LEAST) // prefilling
            most = min(most, max(MIN_CHUNK, 1 << max(0, tokens.bit_length() - 1)))
        return most

    def _sized(self, is_riding: bool, prefilling: int, decoding: int, longest: int) -> int | None:
        """The largest chunk whose time fits; None where no time is known."""
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
        """Seconds that a chunk may add to the next step of rows that generate.

        The bound is per token of a stream: a block that takes as long as two plain steps and gives four tokens may be
        held up for four plain steps, which are two blocks.
        """
        width = self._costs.newest[1]
        gain = self._costs.gain(decoding, width) or 1.0 if width > 1 else 1.0
        step_s = self._costs.scaled(decoding, width) * min(gain, prefilling, STALL_BLOCKS)
        # Many waiting prompts gain more from full batches than a few streams lose by a longer stall.
        crowd = 1 + CROWD * (prefilling - 1) / decoding
        return max((STALL_RATIO - 1) * step_s * crowd, MIN_STALL_S)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + (_QUICKER if new < old else _SLOWER) * (new - old)
