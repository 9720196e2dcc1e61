"""The events of a background response: what readers at different places get, and what is dropped."""

import asyncio

import pytest

from gateway.api.responses.background import READ_BYTES_MAX, EventLog, EventsGone, ReaderPosition

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def event(number: int, size: int = 0) -> bytes:
    return b"data: %d%s\n\n" % (number, b"x" * size)


def log_of(count: int) -> EventLog:
    log = EventLog()
    log.add(b"".join(map(event, range(count))))
    return log


async def read_all(log: EventLog, end: int, number: int = 0) -> list[bytes]:
    """Pieces of the events from `number` up to `end`."""
    place = ReaderPosition(number)
    pieces: list[bytes] = []
    while place != ReaderPosition(end):
        piece, place = await log.read(place, 0)
        pieces.append(piece)
    return pieces


async def test_a_reader_gets_what_follows_its_last_event_and_the_next_number() -> None:
    log = log_of(5)

    for number in range(5):
        data, place = await log.read(ReaderPosition(number), 0)
        assert data == b"".join(map(event, range(number, 5)))
        assert place == ReaderPosition(5)
    assert await log.read(ReaderPosition(5), 0) == (b"", ReaderPosition(5))


async def test_a_reader_waits_for_news_and_for_the_end() -> None:
    log = log_of(1)
    reading = asyncio.create_task(log.read(ReaderPosition(1), 60))
    await asyncio.sleep(0)
    log.add(event(1) + event(2))
    assert await reading == (event(1) + event(2), ReaderPosition(3))

    ending = asyncio.create_task(log.read(ReaderPosition(3), 60))
    await asyncio.sleep(0)
    log.close()
    assert await ending == (b"", ReaderPosition(3))
    assert log.is_over


async def test_a_reader_that_gives_up_takes_nothing_from_the_others() -> None:
    log = log_of(1)
    readers = [asyncio.create_task(log.read(ReaderPosition(1), 60)) for _ in range(3)]
    await asyncio.sleep(0)
    readers[0].cancel()
    await asyncio.sleep(0)
    log.add(event(1))

    assert await asyncio.gather(*readers[1:]) == [(event(1), ReaderPosition(2))] * 2
    assert await log.read(ReaderPosition(2), 0) == (b"", ReaderPosition(2))


async def test_what_is_too_much_drops_the_older_half_and_says_so_to_who_needs_it() -> None:
    log = EventLog(max_bytes=1000)
    for number in range(60):
        log.add(event(number, 40))

    assert log.size_bytes < 2000
    with pytest.raises(EventsGone):
        log.check(ReaderPosition(0))
    with pytest.raises(EventsGone):
        await log.read(ReaderPosition(1), 0)
    assert await log.read(ReaderPosition(58), 0) == (event(58, 40) + event(59, 40), ReaderPosition(60))


async def test_an_event_larger_than_all_that_is_kept_is_still_read() -> None:
    log = EventLog(max_bytes=100)
    log.add(event(0))
    log.add(event(1, 5000))

    assert await log.read(ReaderPosition(1), 0) == (event(1, 5000), ReaderPosition(2))


async def test_a_first_event_of_more_than_half_goes_like_any_other() -> None:
    log = EventLog(max_bytes=1000)
    log.add(event(0, 2000))
    for number in range(1, 30):
        log.add(event(number, 40))

    assert log.size_bytes < 2000
    with pytest.raises(EventsGone):
        log.check(ReaderPosition(0))
    assert await log.read(ReaderPosition(29), 0) == (event(29, 40), ReaderPosition(30))


async def test_a_reader_far_behind_gets_everything_in_bounded_pieces() -> None:
    log = EventLog()
    events = [event(number, 10_000) for number in range(100)] + [event(100, 2 * READ_BYTES_MAX), event(101)]
    log.add(b"".join(events))

    pieces = await read_all(log, 102)
    assert b"".join(pieces) == b"".join(events)
    assert max(map(len, pieces)) <= READ_BYTES_MAX
    # Whole events, but for the one that is larger than a read.
    assert sum(not piece.endswith(b"\n\n") for piece in pieces) == 2


async def test_a_reader_within_an_event_that_goes_does_not_get_another_in_its_place() -> None:
    log = EventLog(max_bytes=4 * READ_BYTES_MAX)
    log.add(event(0, 2 * READ_BYTES_MAX))
    _, place = await log.read(ReaderPosition(0), 0)
    assert place == ReaderPosition(0, READ_BYTES_MAX)
    log.add(event(1, 3 * READ_BYTES_MAX))

    with pytest.raises(EventsGone):
        await log.read(place, 0)


async def test_what_events_repeat_is_not_kept_and_is_in_what_is_read() -> None:
    asked, tools = b'"%s"' % (b"x" * READ_BYTES_MAX), b'"%s"' % (b"y" * 2 * READ_BYTES_MAX)
    log = EventLog(max_bytes=2000, echo={0: memoryview(asked), 3: memoryview(tools)})
    gaps = [b'data: {%d,"a":\x000,"b":\x003}\n\n' % number for number in range(3)]
    telling = [each.replace(b"\x000", asked).replace(b"\x003", tools) for each in gaps]
    events = [*telling[:2], event(2), telling[2], *(event(number, 40) for number in range(4, 8))]
    log.add(b"".join(gaps[:2]))
    for each in (event(2), gaps[2], *events[4:]):
        log.add(each)
    assert log.size_bytes < 1000

    assert log.echo_bytes == len(asked) + len(tools)
    for number in range(len(events)):
        pieces = await read_all(log, len(events), number)
        assert b"".join(pieces) == b"".join(events[number:])
        assert max(map(len, pieces)) <= READ_BYTES_MAX
    log.add(b"".join(event(number, 40) for number in range(8, 60)))
    assert (await log.read(ReaderPosition(58), 0))[0] == b"".join(event(number, 40) for number in (58, 59))
    log.add(gaps[0])
    assert b"".join(await read_all(log, 61, 60)) == telling[0]
