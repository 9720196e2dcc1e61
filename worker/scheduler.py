"""Who runs next."""

import heapq
from itertools import count
from typing import Final

from worker.rows import Row

_STALE_ENTRIES: Final = 64


class Queue:
    """Waiting rows: lower priority numbers first, then in order of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Row]] = []
        self._arrivals = count(1)
        # The rows that wait; entries of the heap that are not in here are gone.
        self._waiting: set[Row] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, row: Row) -> bool:
        return row in self._waiting

    def push(self, row: Row) -> None:
        """Queue a row; one that was queued before keeps its place."""
        row.arrival = row.arrival or next(self._arrivals)
        self._waiting.add(row)
        heapq.heappush(self._heap, (row.priority, row.arrival, row))

    def pop(self) -> Row:
        """The next row. Raises IndexError when empty."""
        while True:
            row = heapq.heappop(self._heap)[2]
            if row in self._waiting:
                self._waiting.remove(row)
                return row

    def remove(self, row: Row) -> None:
        """Forget a row, waiting or not; the heap drops it when it comes up, or when it holds too many of its kind."""
        self._waiting.discard(row)
        if len(self._heap) > 2 * len(self._waiting) + _STALE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapq.heapify(self._heap)
