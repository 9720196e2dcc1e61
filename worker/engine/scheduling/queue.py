"""Queue of waiting rows, in the order in which they run."""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from worker.engine.row import Row

_STALE_ENTRIES: Final = 64


@dataclass(slots=True)
class _PriorityLevel:
    """Waiting rows of one priority. Owned by its queue.

    `begun` is a heap of rows that have run before, here or on another worker, in the order in which they began. `turns`
    are the other rows by tenant, in order of arrival; the tenant whose turn is next comes first.
    """

    begun: list[tuple[float, int, Row]] = field(default_factory=list[tuple[float, int, Row]])
    turns: OrderedDict[str, deque[Row]] = field(default_factory=OrderedDict[str, deque[Row]])

    def is_empty(self) -> bool:
        return not self.begun and not self.turns


class Queue:
    """Waiting rows: lower priority numbers first, then those that have begun, then one of each tenant in turn.

    A tenant thus waits for one row of each other tenant, however many they have sent. The entry of a removed row stays
    until it is popped, or until there are too many stale entries.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _PriorityLevel] = {}
        self._arrivals = count(1)
        self._waiting: set[Row] = set()
        self._entries = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, row: Row) -> bool:
        return row in self._waiting

    def push(self, row: Row) -> None:
        """Queue a new row, or one that was preempted."""
        row.arrival = row.arrival or next(self._arrivals)
        self._add(row)

    def put_back(self, rows: Sequence[Row]) -> None:
        """Undo the pops of these rows, which are in the order in which they were popped."""
        for row in reversed(rows):
            self._add(row, is_next=True)

    def pop(self) -> Row:
        """Remove and return the next row. Raises IndexError when empty."""
        if not self._waiting:
            raise IndexError("no row waits")
        while True:
            priority = min(self._levels)
            level = self._levels[priority]
            row = self._take(level)
            if level.is_empty():
                del self._levels[priority]
            self._entries -= 1
            if row in self._waiting:
                self._waiting.remove(row)
                return row

    def remove(self, row: Row) -> None:
        """Remove a row, if it is waiting."""
        self._waiting.discard(row)
        if self._entries > 2 * len(self._waiting) + _STALE_ENTRIES:
            self._sweep()

    def _add(self, row: Row, *, is_next: bool = False) -> None:
        self._waiting.add(row)
        self._entries += 1
        level = self._levels.setdefault(row.priority, _PriorityLevel())
        if row.stats.admitted or row.output:
            # A row that another worker began comes after those that were admitted here.
            heapq.heappush(level.begun, (row.stats.admitted or math.inf, row.arrival, row))
            return
        rows = level.turns.setdefault(row.tenant, deque())
        if is_next:
            rows.appendleft(row)
            level.turns.move_to_end(row.tenant, last=False)
        else:
            rows.append(row)

    def _take(self, level: _PriorityLevel) -> Row:
        """Remove and return the next entry of a level. Its tenant goes to the end, unless the entry was stale."""
        if level.begun:
            return heapq.heappop(level.begun)[2]
        tenant, rows = next(iter(level.turns.items()))
        row = rows.popleft()
        if not rows:
            del level.turns[tenant]
        elif row in self._waiting:
            level.turns.move_to_end(tenant)
        return row

    def _sweep(self) -> None:
        for priority, level in list(self._levels.items()):
            level.begun = [entry for entry in level.begun if entry[2] in self._waiting]
            heapq.heapify(level.begun)
            for tenant, rows in list(level.turns.items()):
                level.turns[tenant] = kept = deque(row for row in rows if row in self._waiting)
                if not kept:
                    del level.turns[tenant]
            if level.is_empty():
                del self._levels[priority]
        self._entries = len(self._waiting)
