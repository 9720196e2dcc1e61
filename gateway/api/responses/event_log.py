"""Events of a background response, kept so that clients can come back for those that they have not had."""

import asyncio
from array import array
from bisect import bisect_left
from typing import Final

# Of one response: about 40,000 tokens. When it has more, the older half goes.
BYTES_MAX: Final = 8 * 1024 * 1024
# Of one read, and at least one event: each reader has a copy of its own while it is sent.
READ_BYTES_MAX: Final = 256 * 1024
_END: Final = b"\n\n"


class EventsGone(Exception):
    """The events that a reader is to go on with are no longer kept."""


class EventLog:
    """Events in their order, numbered from 0. One writer; any number of readers, each at a place of its own.

    Bytes and the end of each event in two flat buffers: nothing else is kept for a token.
    """

    def __init__(self, max_bytes: int = BYTES_MAX) -> None:
        self._max_bytes = max_bytes
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
        return bytes(memoryview(self._data)[begin : self._ends[last]]), self._first + last

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
        self._ends = array("Q", [end - cut for end in self._ends[count:]])
        self._first += count
