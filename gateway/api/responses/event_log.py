"""Events of a background response, kept so that clients can come back for those that they have not had."""

import asyncio
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

# Of one response: about 40,000 tokens. When it has more, the older half goes.
BYTES_MAX: Final = 8 * 1024 * 1024
# Limit of one read: each reader has a copy of its own while it is sent.
READ_BYTES_MAX: Final = 64 * 1024
# A value that events repeat is left out of them from this size on.
REPEATED_MIN_BYTES: Final = 64 * 1024
_END: Final = b"\n\n"


class EventsGone(Exception):
    """The events that a reader is to go on with are no longer kept."""


class ReaderPosition(NamedTuple):
    """Position of a reader: its next event, and how many bytes of that it has had."""

    number: int
    offset: int = 0


class _Gap(NamedTuple):
    """Place in the kept bytes of a repeated value that was left out, and its part of the echo."""

    at: int
    begin: int
    end: int


class EventLog:
    """Events in their order, numbered from 0. One writer; any number of readers, each at a place of its own.

    Bytes and the end of each event in two flat buffers: nothing else is kept for a token. Several events repeat what
    was asked, which may be most of a large body. Such values are left out of what is kept; a reader brings them along,
    one after the other, as the echo.
    """

    def __init__(self, max_bytes: int = BYTES_MAX, repeated: Sequence[Callable[[], bytes]] = ()) -> None:
        """`repeated` write values as they stand in events; they must write the same each time."""
        self._max_bytes = max_bytes
        self._repeated: list[Callable[[], bytes]] = []
        self.echo_bytes = 0
        for write in repeated:
            if (size := len(write())) >= REPEATED_MIN_BYTES:
                self._repeated.append(write)
                self.echo_bytes += size
        self._gaps: list[_Gap] = []
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

    def check(self, place: ReaderPosition) -> None:
        """Raises `EventsGone` when the next event of a reader is no longer kept."""
        if place.number < self._first:
            raise EventsGone

    def echo(self) -> bytes:
        """The repeated values, for those who read. For any thread."""
        return b"".join(write() for write in self._repeated)

    async def read(self, place: ReaderPosition, timeout_s: float, echo: bytes = b"") -> tuple[bytes, ReaderPosition]:
        """Events that follow `place`, and the place behind them. Nothing new on timeout, and at the end.

        They are whole, but for one that is larger than a read, which comes in pieces. Raises `EventsGone` for a reader
        that is too slow.
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
        """The end of the events from this one on that are one read and have no gap; `index` where there is none."""
        end = begin + READ_BYTES_MAX
        if gap := self._gaps_of(begin, end)[:1]:
            end = gap[0].at
        return bisect_right(self._ends, end, index)

    def _piece(self, index: int, place: ReaderPosition, echo: bytes) -> tuple[bytes, ReaderPosition]:
        """The next bytes of one event."""
        skipped = place.offset
        parts = self._parts(index, echo)
        while skipped >= (size := parts[0][2] - parts[0][1]):
            skipped -= size
            del parts[0]
        source, begin, end = parts[0]
        begin += skipped
        piece = bytes(source[begin : min(end, begin + READ_BYTES_MAX)])
        is_whole = len(parts) == 1 and begin + len(piece) == end
        return piece, ReaderPosition(place.number + 1) if is_whole else ReaderPosition(
            place.number, place.offset + len(piece)
        )

    def _parts(self, index: int, echo: bytes) -> list[tuple[bytes | bytearray, int, int]]:
        """The buffers in which an event is, from where to where."""
        begin, end = self._begin(index), self._ends[index]
        parts: list[tuple[bytes | bytearray, int, int]] = []
        for gap in self._gaps_of(begin, end):
            parts += [(self._data, begin, gap.at), (echo, gap.begin, gap.end)]
            begin = gap.at
        return [*parts, (self._data, begin, end)]

    def _gaps_of(self, begin: int, end: int) -> list[_Gap]:
        """Gaps between two places in the kept bytes."""
        return [gap for gap in self._gaps if begin <= gap.at < end]

    def _leave_out(self, data: bytes) -> bytes:
        """Events without the repeated values, whose places are kept."""
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
        self._gaps = [gap._replace(at=gap.at - cut) for gap in self._gaps if gap.at >= cut]
        self._ends = array("Q", [end - cut for end in self._ends[count:]])
        self._first += count
