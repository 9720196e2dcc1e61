"""Events of a background response, kept so that clients can come back for those that they have not had."""

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Final

# Of one response: about 40,000 tokens. When it has more, the older half goes.
BYTES_MAX: Final = 8 * 1024 * 1024
# Of one read, and at least one event: each reader has a copy of its own while it is sent.
READ_BYTES_MAX: Final = 256 * 1024
# A value that events repeat is left out of them from this size on.
REPEATED_MIN_BYTES: Final = 64 * 1024
_END: Final = b"\n\n"


class EventsGone(Exception):
    """The events that a reader is to go on with are no longer kept."""


class EventLog:
    """Events in their order, numbered from 0. One writer; any number of readers, each at a place of its own.

    Bytes and the end of each event in two flat buffers: nothing else is kept for a token. Several events tell what was
    asked, which may be most of a large body: it is left out of what is kept, and written again for each read.
    """

    def __init__(self, max_bytes: int = BYTES_MAX, repeated: Sequence[Callable[[], bytes]] = ()) -> None:
        """`repeated` write values as they stand in events; they must write the same each time."""
        self._max_bytes = max_bytes
        self._repeated = [write for write in repeated if len(write()) >= REPEATED_MIN_BYTES]
        # Places in `_data` where one of them was, in their order.
        self._gaps: list[tuple[int, Callable[[], bytes]]] = []
        self._data = bytearray()
        # Ends of the events in `_data`, the first of which has the number `_first`.
        self._ends = array("Q")
        self._first = 0
        self._news: asyncio.Future[None] | None = None
        self.is_over = False

    @property
    def size_bytes(self) -> int:
        return len(self._data) + self._ends.itemsize * len(self._ends)

    def add(self, data: bytes) -> None:
        """Append whole events, possibly none, and wake the readers."""
        if not data:
            return
        begin, place = len(self._data), 0
        if self._repeated and len(data) >= REPEATED_MIN_BYTES:
            data = self._leave_out(data)
        self._data += data
        while place < len(data):
            place = data.index(_END, place) + len(_END)
            self._ends.append(begin + place)
        if len(self._data) > self._max_bytes:
            self._drop_older_half()
        self._wake()

    def skip(self, number: int) -> None:
        """Forget all events: the next one has this number."""
        self._data.clear()
        self._gaps.clear()
        self._ends = array("Q")
        self._first = number

    def close(self) -> None:
        """No more events come."""
        self.is_over = True
        self._wake()

    def check(self, after: int) -> None:
        """Raises `EventsGone` when the event that follows number `after` is no longer kept."""
        if after + 1 < self._first:
            raise EventsGone

    async def read(self, after: int, timeout_s: float) -> tuple[bytes, int]:
        """Events that follow number `after`, and the number of the last. Nothing new on timeout, and at the end.

        What is more than a read may have comes with the next one. Raises `EventsGone` for a reader that is too slow.
        """
        self.check(after)
        index = after + 1 - self._first
        if index >= len(self._ends) and not self.is_over:
            await self._wait(timeout_s)
            self.check(after)
            index = after + 1 - self._first
        if index >= len(self._ends):
            return b"", after
        begin = self._ends[index - 1] if index else 0
        full = bisect_left(self._ends, begin + READ_BYTES_MAX)
        last = min(max(index, full), len(self._ends) - 1)
        gaps = [gap for gap in self._gaps if begin <= gap[0] < self._ends[last]]
        if gaps:  # a read is at most one event with such values
            last = min(last, bisect_right(self._ends, gaps[0][0]))
        return self._whole(begin, self._ends[last], gaps), self._first + last

    def _leave_out(self, data: bytes) -> bytes:
        """Events without the repeated values, whose places are kept."""
        parts: list[bytes | Callable[[], bytes]] = [data]
        for write in self._repeated:
            value, before, parts = write(), parts, []
            for part in before:
                for at, piece in enumerate(part.split(value) if isinstance(part, bytes) else [part]):
                    parts += [write, piece] if at else [piece]
        kept, size = list[bytes](), len(self._data)
        for part in parts:
            if isinstance(part, bytes):
                kept.append(part)
                size += len(part)
            else:
                self._gaps.append((size, part))
        return b"".join(kept)

    def _whole(self, begin: int, end: int, gaps: Sequence[tuple[int, Callable[[], bytes]]]) -> bytes:
        """Events as they were added."""
        parts: list[bytes] = []
        view = memoryview(self._data)
        for at, write in gaps:
            if at >= end:
                break
            parts += [bytes(view[begin:at]), write()]
            begin = at
        parts.append(bytes(view[begin:end]))
        view.release()
        return b"".join(parts)

    async def _wait(self, timeout_s: float) -> None:
        if self._news is None:
            self._news = asyncio.get_running_loop().create_future()
        # Shared by all readers: one that gives up must not cancel it.
        await asyncio.wait({self._news}, timeout=timeout_s)

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
            self._news = None

    def _drop_older_half(self) -> None:
        """At least one event where there are two; the newest stays, however large."""
        count = min(max(1, bisect_left(self._ends, len(self._data) // 2)), len(self._ends) - 1)
        if count <= 0:
            return
        cut = self._ends[count - 1]
        del self._data[:cut]
        self._gaps = [(at - cut, write) for at, write in self._gaps if at >= cut]
        self._ends = array("Q", [end - cut for end in self._ends[count:]])
        self._first += count
