"""Prefill chunk size: the tokens of prompts that a tick may process beside the running streams."""

import math
from dataclasses import dataclass, field
from typing import Final

# Chunks are powers of two from here, so that few shapes are ever compiled.
MIN_CHUNK: Final = 8
# Where nothing is known yet and others would have to wait.
FIRST_CHUNK: Final = 32
# A tick that also prefills may last this many times a plain decode step, if as many prompt tokens as are enough find a
# place in it …
GENTLE_RATIO: Final = 1.4
ENOUGH: Final = 128
# … or else this many times …
STALL_RATIO: Final = 2.2
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
# What twice the tokens are hoped to cost before it was tried: large chunks are the more efficient ones.
_HOPE: Final = 1.6
# Leave the one forward pass for two only where these take this part of its time.
_MARGIN: Final = 0.9
# Times follow what gets quicker at once and what gets slower slowly: the first of a size may have compiled kernels.
_QUICKER: Final = 0.7
_SLOWER: Final = 0.4
# A size that was not used for this many chunks is forgotten: its time was another context's, or an accident.
_MEMORY: Final = 24


@dataclass(slots=True, frozen=True)
class Chunk:
    """Prompt tokens for each prefilling row in a tick, and whether they ride on its step: in one forward pass."""

    tokens: int
    rides: bool = True


@dataclass(slots=True)
class _Times:
    """Seconds that a number of prompt tokens, a power of two, adds to a tick."""

    seconds: dict[int, float] = field(default_factory=dict[int, float])
    # The newest chunk of each size, counted over both ways.
    _used: dict[int, int] = field(default_factory=dict[int, int])

    def observe(self, tokens: int, seconds: float, chunk: int) -> None:
        size = _bucket(tokens)
        self.seconds[size] = _smooth(self.seconds.get(size, 0.0), seconds * size / tokens)
        self._used[size] = chunk

    def forget(self, chunk: int) -> None:
        for stale in [at for at, used in self._used.items() if chunk - used > _MEMORY]:
            del self.seconds[stale], self._used[stale]

    def predict(self, tokens: int) -> float:
        """Seconds for that many tokens, from the nearest size that is known."""
        size = _bucket(tokens)
        nearest = min(self.seconds, key=lambda known: (abs(math.log2(known / size)), -known))
        time, doublings = self.seconds[nearest], math.log2(size / nearest)
        if doublings <= 0:
            return time * 2.0**doublings
        half = self.seconds.get(nearest // 2)
        if half is None:  # hope for one step at a time
            return time * (_HOPE if doublings <= 1 else 2.0**doublings)
        # The next size by the line through the two before it; sizes beyond that in proportion.
        return min(max(time, 3 * time - 2 * half), 2 * time) * 2.0 ** (doublings - 1)


class ChunkPolicy:
    """Sizes prefill chunks by measured time, so that a long prompt slows running streams by a bounded ratio.

    A chunk has a cost of its own beside that of its tokens, so times are kept by size: a size is used when its time
    fits, and tried when half of it took so little that it may. Decode is never starved: a tick holds one decode step
    and at most one chunk per prefilling row. Prefill is never starved: the chunk has a minimum. Chunks that ride on the
    step and those in forward passes of their own are measured apart, and the quicker way is taken.
    """

    def __init__(self, max_chunk: int, *, is_fixed: bool = False, can_ride: bool = True) -> None:
        """With `is_fixed` every chunk has `max_chunk` tokens, but for the end of a prompt: time decides nothing."""
        self._max = max_chunk
        self._is_fixed = is_fixed
        self._can_ride = can_ride
        self._step_s = 0.0
        self._riding = _Times()
        self._apart = _Times()
        self._chunks = 0

    def chunk(self, prefilling: int, decoding: int, longest: int = SHORT_PROMPT + 1) -> Chunk:
        """For the next tick; `longest` is what the longest prompt has in all."""
        if prefilling == 0 or self._is_fixed:
            return Chunk(self._max)
        apart = self._sized(self._apart, prefilling, decoding, longest)
        riding = self._sized(self._riding, prefilling, decoding, longest)
        if not decoding:
            return Chunk(apart or riding or self._max, rides=False)
        if not self._can_ride:
            return Chunk(apart or min(self._max, FIRST_CHUNK), rides=False)
        if riding is None or apart is None:  # riding is hoped to be no slower
            return Chunk(riding or apart or min(self._max, FIRST_CHUNK))
        paces = (
            size / max(times.predict(size * prefilling), 1e-9)
            for times, size in ((self._riding, riding), (self._apart, apart))
        )
        return Chunk(riding) if next(paces) >= _MARGIN * next(paces) else Chunk(apart, rides=False)

    def observe(self, seconds: float, prefilled: int, decoding: int, *, rode: bool = False) -> None:
        """Learn from a forward pass, or two: the time with so many prompt tokens, beside so many decoding rows."""
        if prefilled == 0:
            if decoding:
                self._step_s = _smooth(self._step_s, seconds)
            return
        added_s = seconds - (self._step_s if decoding else 0.0)
        self._chunks += 1
        if added_s > 0:
            (self._riding if rode else self._apart).observe(prefilled, added_s, self._chunks)
        for times in (self._riding, self._apart):
            times.forget(self._chunks)

    def _sized(self, times: _Times, prefilling: int, decoding: int, longest: int) -> int | None:
        """The largest chunk whose time fits; None where no time is known."""
        if not times.seconds:
            return None
        limit_s = self._limit_s(prefilling, decoding, longest)
        if decoding and times is self._riding:
            gentle = self._fitting(times, prefilling, limit_s * (GENTLE_RATIO - 1) / (STALL_RATIO - 1))
            if gentle * prefilling >= ENOUGH or gentle >= longest:
                return gentle
        return self._fitting(times, prefilling, limit_s)

    def _fitting(self, times: _Times, prefilling: int, limit_s: float) -> int:
        size = MIN_CHUNK
        while size < self._max and times.predict(2 * size * prefilling) <= limit_s:
            size *= 2
        return min(size, self._max)

    def _limit_s(self, prefilling: int, decoding: int, longest: int) -> float:
        is_short = longest <= SHORT_PROMPT
        factor = SHORT_PROMPT_FACTOR if is_short else 1.0
        if not decoding:
            return factor * (IDLE_TICK_S if prefilling == 1 or is_short else SHARED_TICK_S)
        limit_s = max((STALL_RATIO - 1) * self._step_s, MIN_STALL_S)
        # Many waiting prompts gain more from full batches than a few streams lose by a longer stall.
        return factor * limit_s * max(1.0, prefilling / decoding)


def _bucket(tokens: int) -> int:
    """The nearest power of two."""
    return 1 << max(0, round(math.log2(tokens)))


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + (_QUICKER if new < old else _SLOWER) * (new - old)
