"""Who runs next, and how much prompt a tick may process."""

import heapq
from itertools import count
from typing import Final

from worker.rows import Row

# Chunks are powers of two between these, so that few shapes are ever compiled.
MIN_CHUNK: Final = 32
# A tick that also prefills may last this many times a plain decode step …
STALL_RATIO: Final = 2.2
# … unless that step is so short that nobody notices.
MIN_STALL_S: Final = 0.004
# Alone, prefill runs in ticks of about this long, so that commands are seen in between.
IDLE_TICK_S: Final = 0.25
_SMOOTHING: Final = 0.25
_STALE_ENTRIES: Final = 64


class Queue:
    """Waiting rows: lower priority numbers first, then in order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Row]] = []
        self._arrivals = count(1)
        # The rows that wait, with their arrival number; entries of the heap that are not in here are gone.
        self._waiting: dict[Row, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, row: Row) -> None:
        """Queue a row; one that was queued before keeps its place."""
        row.arrival = row.arrival or next(self._arrivals)
        arrival = self._waiting[row] = row.arrival
        heapq.heappush(self._heap, (row.priority, arrival, row))

    def pop(self) -> Row:
        """The next row. Raises IndexError when empty."""
        while True:
            _, arrival, row = heapq.heappop(self._heap)
            if self._waiting.get(row) == arrival:
                del self._waiting[row]
                return row

    def remove(self, row: Row) -> None:
        """Forget a row, waiting or not; the heap drops it when it comes up, or when it holds too many of its kind."""
        self._waiting.pop(row, None)
        if len(self._heap) > 2 * len(self._waiting) + _STALE_ENTRIES:
            self._heap = self._entries()

    def rows(self) -> list[Row]:
        return [row for _, _, row in self._entries()]

    def held(self) -> int:
        """Entries in memory, those of removed rows included."""
        return len(self._heap)

    def _entries(self) -> list[tuple[int, int, Row]]:
        """What waits, in order; a sorted list is a heap."""
        return sorted(
            (entry for entry in self._heap if self._waiting.get(entry[2]) == entry[1]), key=lambda entry: entry[:2]
        )


class ChunkPolicy:
    """Sizes prefill chunks by measured time, so that a long prompt slows running streams by a bounded ratio.

    Decode is never starved: a tick holds one decode step and at most one chunk per prefilling row. Prefill is never
    starved: the chunk has a minimum.
    """

    def __init__(self, max_chunk: int) -> None:
        self._max = max_chunk
        self._step_s = 0.0
        self._token_s = 0.0

    def chunk(self, prefilling: int, decoding: int) -> int:
        """Prompt tokens for each prefilling row in the next tick."""
        if prefilling == 0:
            return self._max
        if self._token_s == 0.0:
            return min(self._max, MIN_CHUNK) if decoding else self._max
        if decoding:
            stall_s = max((STALL_RATIO - 1) * self._step_s, MIN_STALL_S)
            # Many waiting prompts gain more from full batches than a few streams lose by a longer stall.
            stall_s *= max(1.0, prefilling / decoding)
        else:
            stall_s = IDLE_TICK_S
        budget = int(stall_s / self._token_s) // prefilling
        return min(self._max, max(MIN_CHUNK, 1 << max(budget, 1).bit_length() - 1))

    def observe(self, tick_s: float, prefilled: int, decoding: int) -> None:
        """Learn from one tick: how long it took, with how many prompt tokens, beside how many decoding rows."""
        if prefilled == 0:
            if decoding:
                self._step_s = _smooth(self._step_s, tick_s)
            return
        prefill_s = tick_s - (self._step_s if decoding else 0.0)
        if prefill_s > 0:
            self._token_s = _smooth(self._token_s, prefill_s / prefilled)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + _SMOOTHING * (new - old)
