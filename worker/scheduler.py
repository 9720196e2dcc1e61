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
        # The rows that wait, with their arrival number; entries of the heap that are not in here are gone.
        self._waiting: dict[Row, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, row: Row) -> bool:
        return row in self._waiting

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
