"""Log of a background response's events, for clients that reconnect and read the events that they missed."""

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Final, NamedTuple

from gateway.api.responses.echo import pieces

# Maximum size of one response's log, about 40,000 tokens. When it is reached, the older half is dropped.
LOG_BYTES_MAX: Final = 8 * 1024 * 1024
# Maximum size of one read, which copies the bytes for its reader.
READ_BYTES_MAX: Final = 64 * 1024
_END: Final = b"\n\n"


class EventsGone(Exception):
    """Raised when events that a reader has not read yet were dropped."""


class ReaderPosition(NamedTuple):
    """Position of a reader: its next event, and how many bytes of that event it has read."""

    number: int
    offset: int = 0


class _Gap(NamedTuple):
    """Position in the stored bytes where a field was left out, and the number of the field."""

    at: int
    field: int


class EventLog:
    """Log of events in order, numbered from 0, with one writer and any number of readers.

    Two flat buffers hold the events' bytes and the offset where each event ends, so there is no object per event. Some
    events repeat ("echo") fields of the request, which can be most of a large body. Such events come with gaps, and the
    log has one copy of each field for all of them.
    """

    def __init__(self, max_bytes: int = LOG_BYTES_MAX, echo: Mapping[int, memoryview] | None = None) -> None:
        """`echo` has the encoded large fields by the numbers of their gaps."""
        self._max_bytes = max_bytes
        self._echo = echo or {}
        self.echo_bytes = sum(map(len, self._echo.values()))
        self._gaps: list[_Gap] = []
        self._data = bytearray()
        # Offsets in `_data` where the events end. The first event has the number `_first`.
        self._ends = array("Q")
        self._first = 0
        self._new_events: asyncio.Future[None] | None = None
        self.is_over = False

    @property
    def size_bytes(self) -> int:
        return len(self._data) + self._ends.itemsize * len(self._ends)

    def add(self, data: bytes) -> None:
        """Append whole events, or none if `data` is empty, and wake the readers."""
        if not data:
            return
        place = len(self._data)
        for piece in pieces(data):
            if isinstance(piece, int):
                self._gaps.append(_Gap(len(self._data), piece))
            else:
                self._data += piece
        while place < len(self._data):
            place = self._data.index(_END, place) + len(_END)
            self._ends.append(place)
        if len(self._data) > self._max_bytes:
            self._drop_older_half()
        self._wake()

    def skip(self, number: int) -> None:
        """Drop all events, and number the next one `number`."""
        self._data.clear()
        self._gaps.clear()
        self._ends = array("Q")
        self._first = number

    def close(self) -> None:
        """End the log: no more events follow."""
        self.is_over = True
        self._wake()

    def check(self, place: ReaderPosition) -> None:
        """Raises `EventsGone` if the reader's next event was dropped."""
        if place.number < self._first:
            raise EventsGone

    async def read(self, place: ReaderPosition, timeout_s: float) -> tuple[bytes, ReaderPosition]:
        """Return the events that follow `place`, and the position after them.

        Returns no bytes on timeout and at the end of the log. Only an event that is larger than a read comes in pieces.
        Raises `EventsGone` if the reader is too slow.
        """
        self.check(place)
        if place.number - self._first >= len(self._ends) and not self.is_over:
            await self._wait(timeout_s)
            self.check(place)
        index = place.number - self._first
        if index >= len(self._ends):
            return b"", place
        begin = self._begin(index)
        behind = self._whole_events(index, begin)
        if place.offset or behind == index:
            return self._piece(index, place)
        return bytes(self._data[begin : self._ends[behind - 1]]), ReaderPosition(self._first + behind)

    def _begin(self, index: int) -> int:
        return self._ends[index - 1] if index else 0

    def _whole_events(self, index: int, begin: int) -> int:
        """Return the index after the last whole event that fits into one read and has no gap; `index` if
        there is none.
        """
        end = begin + READ_BYTES_MAX
        if gap := self._gaps_of(begin, end)[:1]:
            end = gap[0].at
        return bisect_right(self._ends, end, index)

    def _piece(self, index: int, place: ReaderPosition) -> tuple[bytes, ReaderPosition]:
        """Return the next bytes of one event."""
        skipped = place.offset
        parts = self._parts(index)
        while skipped >= (size := parts[0][2] - parts[0][1]):
            skipped -= size
            del parts[0]
        source, begin, end = parts[0]
        begin += skipped
        piece = bytes(source[begin : min(end, begin + READ_BYTES_MAX)])
        is_whole = len(parts) == 1 and begin + len(piece) == end
        if is_whole:
            return piece, ReaderPosition(place.number + 1)
        return piece, place._replace(offset=place.offset + len(piece))

    def _parts(self, index: int) -> list[tuple[bytearray | memoryview, int, int]]:
        """Return the slices of `_data` and the fields that make up an event."""
        begin, end = self._begin(index), self._ends[index]
        parts: list[tuple[bytearray | memoryview, int, int]] = []
        for gap in self._gaps_of(begin, end):
            field = self._echo[gap.field]
            parts += [(self._data, begin, gap.at), (field, 0, len(field))]
            begin = gap.at
        return [*parts, (self._data, begin, end)]

    def _gaps_of(self, begin: int, end: int) -> list[_Gap]:
        """Return the gaps between two positions in the stored bytes."""
        return [gap for gap in self._gaps if begin <= gap.at < end]

    async def _wait(self, timeout_s: float) -> None:
        if self._new_events is None:
            self._new_events = asyncio.get_running_loop().create_future()
        # All readers share the future, so a timeout must not cancel it.
        await asyncio.wait({self._new_events}, timeout=timeout_s)

    def _wake(self) -> None:
        if self._new_events is not None:
            self._new_events.set_result(None)
            self._new_events = None

    def _drop_older_half(self) -> None:
        """Drop the older half of the events, at least one if there are two. The newest event stays, however large it
        is.
        """
        count = min(max(1, bisect_left(self._ends, len(self._data) // 2)), len(self._ends) - 1)
        if count <= 0:
            return
        cut = self._ends[count - 1]
        del self._data[:cut]
        self._gaps = [gap._replace(at=gap.at - cut) for gap in self._gaps if gap.at >= cut]
        self._ends = array("Q", [end - cut for end in self._ends[count:]])
        self._first += count
