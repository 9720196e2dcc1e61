"""The events of a background response: what readers at different places get, and what is dropped."""

import asyncio

import pytest

from gateway.api.responses.event_log import READ_BYTES_MAX, REPEATED_MIN_BYTES, EventLog, EventsGone

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


async def test_a_reader_gets_what_follows_its_last_event_and_the_next_number() -> None:
    log = log_of(5)

    for after in range(-1, 4):
        data, last = await log.read(after, 0)
        assert data == b"".join(map(event, range(after + 1, 5)))
        assert last == 4
    assert await log.read(4, 0) == (b"", 4)


async def test_a_reader_waits_for_news_and_for_the_end() -> None:
    log = log_of(1)
    reading = asyncio.create_task(log.read(0, 60))
    await asyncio.sleep(0)
    log.add(event(1) + event(2))
    assert await reading == (event(1) + event(2), 2)

    ending = asyncio.create_task(log.read(2, 60))
    await asyncio.sleep(0)
    log.close()
    assert await ending == (b"", 2)
    assert log.is_over


async def test_a_reader_that_gives_up_takes_nothing_from_the_others() -> None:
    log = log_of(1)
    readers = [asyncio.create_task(log.read(0, 60)) for _ in range(3)]
    await asyncio.sleep(0)
    readers[0].cancel()
    await asyncio.sleep(0)
    log.add(event(1))

    assert await asyncio.gather(*readers[1:]) == [(event(1), 1)] * 2
    assert await log.read(1, 0) == (b"", 1)


async def test_what_is_too_much_drops_the_older_half_and_says_so_to_who_needs_it() -> None:
    log = EventLog(max_bytes=1000)
    for number in range(60):
        log.add(event(number, 40))

    assert log.size_bytes < 2000
    with pytest.raises(EventsGone):
        log.check(-1)
    with pytest.raises(EventsGone):
        await log.read(0, 0)
    data, last = await log.read(57, 0)
    assert (data, last) == (event(58, 40) + event(59, 40), 59)


async def test_an_event_larger_than_all_that_is_kept_is_still_read() -> None:
    log = EventLog(max_bytes=100)
    log.add(event(0))
    log.add(event(1, 5000))

    assert await log.read(0, 0) == (event(1, 5000), 1)


async def test_a_first_event_of_more_than_half_goes_like_any_other() -> None:
    log = EventLog(max_bytes=1000)
    log.add(event(0, 2000))
    for number in range(1, 30):
        log.add(event(number, 40))

    assert log.size_bytes < 2000
    with pytest.raises(EventsGone):
        log.check(-1)
    assert await log.read(28, 0) == (event(29, 40), 29)


async def test_a_reader_far_behind_gets_everything_in_bounded_pieces() -> None:
    log = EventLog()
    events = [event(number, 10_000) for number in range(100)] + [event(100, 2 * READ_BYTES_MAX), event(101)]
    log.add(b"".join(events))

    pieces: list[bytes] = []
    after = -1
    while after < 101:
        piece, after = await log.read(after, 0)
        pieces.append(piece)

    assert b"".join(pieces) == b"".join(events)
    assert max(map(len, pieces)) <= READ_BYTES_MAX + len(events[100])
    assert len(pieces) >= 4


async def test_what_events_repeat_is_not_kept_and_is_in_what_is_read() -> None:
    asked, tools = [b'"a":"%s"' % (b"x" * REPEATED_MIN_BYTES), b'"b":"%s"' % (b"y" * 2 * REPEATED_MIN_BYTES)]
    log = EventLog(max_bytes=2000, repeated=[lambda: asked, lambda: tools, lambda: b"of no size"])
    telling = [b"data: {%d,%s,%s}\n\n" % (number, asked, tools) for number in range(3)]
    events = [*telling[:2], event(2), telling[2], *(event(number, 40) for number in range(4, 8))]
    log.add(b"".join(events[:2]))
    for each in events[2:]:
        log.add(each)
    assert log.size_bytes < 1000

    for after in range(-1, len(events) - 1):
        read, last = await log.read(after, 0)
        assert read == b"".join(events[after + 1 : last + 1])
        assert sum(asked in each for each in events[after + 1 : last + 1]) <= 1
    log.add(b"".join(event(number, 40) for number in range(8, 60)))
    read, last = await log.read(57, 0)
    assert read == b"".join(event(number, 40) for number in (58, 59))
    log.add(telling[0])
    assert (await log.read(59, 0))[0] == telling[0]
