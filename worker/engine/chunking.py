"""Prefill chunk size: the tokens of prompts that a tick may process beside the running streams."""

import math
from typing import Final

# Chunks are powers of two from here, so that few shapes are ever compiled.
MIN_CHUNK: Final = 8
# Where nothing is known yet and others would have to wait.
FIRST_CHUNK: Final = 32
# A tick that also prefills may last this many times a plain decode step …
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
# Times follow what gets quicker at once and what gets slower slowly: the first of a size may have compiled kernels.
_QUICKER: Final = 0.7
_SLOWER: Final = 0.4
# A size that was not used for this many chunks is forgotten: its time was another context's, or an accident.
_MEMORY: Final = 24


class ChunkPolicy:
    """Sizes prefill chunks by measured time, so that a long prompt slows running streams by a bounded ratio.

    A chunk has a cost of its own beside that of its tokens, so times are kept by size: a size is used when its time
    fits, and tried when half of it took so little that it may. Decode is never starved: a tick holds one decode step
    and at most one chunk per prefilling row. Prefill is never starved: the chunk has a minimum.
    """

    def __init__(self, max_chunk: int, *, is_fixed: bool = False) -> None:
        """With `is_fixed` every chunk has `max_chunk` tokens, but for the end of a prompt: time decides nothing."""
        self._max = max_chunk
        self._is_fixed = is_fixed
        self._step_s = 0.0
        # Seconds that a number of prompt tokens, a power of two, adds to a tick.
        self._times: dict[int, float] = {}
        self._used: dict[int, int] = {}
        self._chunks = 0

    def chunk(self, prefilling: int, decoding: int, longest: int = SHORT_PROMPT + 1) -> int:
        """Prompt tokens for each prefilling row in the next tick; `longest` is what the longest of them has in all."""
        if prefilling == 0 or self._is_fixed:
            return self._max
        if not self._times:
            return min(self._max, FIRST_CHUNK) if decoding else self._max
        limit_s = self._limit_s(prefilling, decoding, longest)
        size = MIN_CHUNK
        while size < self._max and self._predict(2 * size * prefilling) <= limit_s:
            size *= 2
        return min(size, self._max)

    def observe(self, tick_s: float, prefilled: int, decoding: int) -> None:
        """Learn from one tick: how long it took, with how many prompt tokens, beside how many decoding rows."""
        if prefilled == 0:
            if decoding:
                self._step_s = _smooth(self._step_s, tick_s)
            return
        prefill_s = tick_s - (self._step_s if decoding else 0.0)
        if prefill_s <= 0:
            return
        size = _bucket(prefilled)
        self._times[size] = _smooth(self._times.get(size, 0.0), prefill_s * size / prefilled)
        self._chunks += 1
        self._used[size] = self._chunks
        for stale in [at for at, used in self._used.items() if self._chunks - used > _MEMORY]:
            del self._times[stale], self._used[stale]

    def _limit_s(self, prefilling: int, decoding: int, longest: int) -> float:
        is_short = longest <= SHORT_PROMPT
        factor = SHORT_PROMPT_FACTOR if is_short else 1.0
        if not decoding:
            return factor * (IDLE_TICK_S if prefilling == 1 or is_short else SHARED_TICK_S)
        limit_s = max((STALL_RATIO - 1) * self._step_s, MIN_STALL_S)
        # Many waiting prompts gain more from full batches than a few streams lose by a longer stall.
        return factor * limit_s * max(1.0, prefilling / decoding)

    def _predict(self, tokens: int) -> float:
        """Seconds for that many tokens, from the nearest size that is known."""
        size = _bucket(tokens)
        nearest = min(self._times, key=lambda known: (abs(math.log2(known / size)), -known))
        time, doublings = self._times[nearest], math.log2(size / nearest)
        if doublings <= 0:
            return time * 2.0**doublings
        half = self._times.get(nearest // 2)
        if half is None:  # hope for one step at a time
            return time * (_HOPE if doublings <= 1 else 2.0**doublings)
        # The next size by the line through the two before it; sizes beyond that in proportion.
        return min(max(time, 3 * time - 2 * half), 2 * time) * 2.0 ** (doublings - 1)


def _bucket(tokens: int) -> int:
    """The nearest power of two."""
    return 1 << max(0, round(math.log2(tokens)))


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + (_QUICKER if new < old else _SLOWER) * (new - old)
