"""Queue of waiting rows, in the order in which they run."""

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from worker.engine.row import Row


@dataclass(slots=True)
class _PriorityLevel:
    """Waiting rows of one priority. Owned by its queue.

    `begun` are rows that have run before, here or on another worker, in the order in which they began. `turns` are the
    other rows by tenant, in order of arrival; the tenant whose turn is next comes first.
    """

    begun: list[tuple[float, int, Row]] = field(default_factory=list[tuple[float, int, Row]])
    turns: OrderedDict[str, OrderedDict[Row, None]] = field(default_factory=OrderedDict[str, OrderedDict[Row, None]])


class Queue:
    """Waiting rows: lower priority numbers come first, then rows that have begun, then one row of each tenant in turn.

    A tenant thus waits for one row of each other tenant, however many rows the others have sent.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _PriorityLevel] = {}
        self._arrivals = count(1)
        self._waiting: set[Row] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, row: Row) -> bool:
        return row in self._waiting

    def push(self, row: Row) -> None:
        """Queue a new row, or one that was preempted."""
        row.arrival = row.arrival or next(self._arrivals)
        self._add(row)

    def put_back(self, rows: Sequence[Row]) -> None:
        """Undo the pops of these rows, given in the order in which they were popped."""
        for row in reversed(rows):
            self._add(row, is_next=True)

    def pop(self) -> Row:
        """Remove and return the next row. Raises IndexError when empty."""
        if not self._waiting:
            raise IndexError("no row waits")
        level = self._levels[min(self._levels)]
        if level.begun:
            row = level.begun[0][2]
        else:
            tenant, rows = next(iter(level.turns.items()))
            row = next(iter(rows))
            level.turns.move_to_end(tenant)
        self.remove(row)
        return row

    def remove(self, row: Row) -> None:
        """Remove a row, if it is waiting."""
        if row not in self._waiting:
            return
        self._waiting.remove(row)
        level = self._levels[row.priority]
        rows = level.turns.get(row.tenant)
        if rows is not None and row in rows:
            del rows[row]
            if not rows:
                del level.turns[row.tenant]
        else:
            level.begun = [entry for entry in level.begun if entry[2] is not row]
        if not level.begun and not level.turns:
            del self._levels[row.priority]

    def _add(self, row: Row, *, is_next: bool = False) -> None:
        self._waiting.add(row)
        level = self._levels.setdefault(row.priority, _PriorityLevel())
        if row.stats.admitted or row.output:
            # A row that another worker began comes after those that were admitted here.
            insort(level.begun, (row.stats.admitted or math.inf, row.arrival, row))
            return
        rows = level.turns.setdefault(row.tenant, OrderedDict())
        rows[row] = None
        if is_next:
            rows.move_to_end(row, last=False)
            level.turns.move_to_end(row.tenant, last=False)
