"""Log of a background response's events, for clients that reconnect and read the events that they missed."""

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

# Maximum size of one response's log, about 40,000 tokens. When it is reached, the older half is dropped.
LOG_BYTES_MAX: Final = 8 * 1024 * 1024
# Maximum size of one read, which copies the bytes for its reader.
READ_BYTES_MAX: Final = 64 * 1024
# If the events repeat a value of at least this size, the log does not store it.
REPEATED_MIN_BYTES: Final = 64 * 1024
_END: Final = b"\n\n"


class EventsGone(Exception):
    """Raised when events that a reader has not read yet were dropped."""


class ReaderPosition(NamedTuple):
    """Position of a reader: its next event, and how many bytes of that event it has read."""

    number: int
    offset: int = 0


class _Gap(NamedTuple):
    """Position in the stored bytes where a repeated value was left out, and the value's range in the echo."""

    at: int
    begin: int
    end: int


class EventLog:
    """Log of events in order, numbered from 0, with one writer and any number of readers.

    Two flat buffers hold the events' bytes and the offset where each event ends, so there is no object per event. Some
    events repeat ("echo") values of the request, which can be most of a large body. The log does not store these
    values; a reader passes all of them to `read`, concatenated, as the echo.
    """

    def __init__(self, max_bytes: int = LOG_BYTES_MAX, repeated: Sequence[Callable[[], bytes]] = ()) -> None:
        """Each function in `repeated` returns one repeated value as the events contain it. It must always return the
        same bytes.
        """
        self._max_bytes = max_bytes
        self._repeated: list[Callable[[], bytes]] = []
        self.echo_bytes = 0
        for write in repeated:
            if (size := len(write())) >= REPEATED_MIN_BYTES:
                self._repeated.append(write)
                self.echo_bytes += size
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

    def echo(self) -> bytes:
        """Return the repeated values, for readers. May run in any thread."""
        return b"".join(write() for write in self._repeated)

    async def read(self, place: ReaderPosition, timeout_s: float, echo: bytes = b"") -> tuple[bytes, ReaderPosition]:
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
            return self._piece(index, place, echo)
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

    def _piece(self, index: int, place: ReaderPosition, echo: bytes) -> tuple[bytes, ReaderPosition]:
        """Return the next bytes of one event."""
        skipped = place.offset
        parts = self._parts(index, echo)
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

    def _parts(self, index: int, echo: bytes) -> list[tuple[bytes | bytearray, int, int]]:
        """Return the slices of `_data` and of the echo that make up an event."""
        begin, end = self._begin(index), self._ends[index]
        parts: list[tuple[bytes | bytearray, int, int]] = []
        for gap in self._gaps_of(begin, end):
            parts += [(self._data, begin, gap.at), (echo, gap.begin, gap.end)]
            begin = gap.at
        return [*parts, (self._data, begin, end)]

    def _gaps_of(self, begin: int, end: int) -> list[_Gap]:
        """Return the gaps between two positions in the stored bytes."""
        return [gap for gap in self._gaps if begin <= gap.at < end]

    def _leave_out(self, data: bytes) -> bytes:
        """Return the events without the repeated values, and record the gaps."""
        parts: list[bytes | tuple[int, int]] = [data]
        echoed = 0
        for write in self._repeated:
            value, before, parts = write(), parts, []
            span = (echoed, echoed + len(value))
            echoed = span[1]
            for part in before:
                for at, piece in enumerate(part.split(value) if isinstance(part, bytes) else [part]):
                    parts += [span, piece] if at else [piece]
        kept, size = list[bytes](), len(self._data)
        for part in parts:
            if isinstance(part, bytes):
                kept.append(part)
                size += len(part)
            else:
                self._gaps.append(_Gap(size, *part))
        return b"".join(kept)

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
