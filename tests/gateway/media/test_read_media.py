"""Bytes of a request's media: how often they are read, and when they are counted."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from gateway.config.settings import MediaConfig
from gateway.errors import Unavailable
from gateway.media import read_media as module
from gateway.media.media_reference import IMAGE, Reference, stored_url
from gateway.media.read_media import InFlightBytes, MediaReader, bounded, digest_of, resolve
from gateway.telemetry.metrics import MediaNumbers
from protocol.to_worker import ChatPrompt, Media

pytestmark = pytest.mark.anyio
DATA = b"picture" * 100


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def fetch(owner: str, url: str, limit_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
    raise AssertionError("nothing is fetched")


async def at_once(action: Callable[[], Media]) -> Media:
    return action()


async def stored(digests: Sequence[bytes]) -> dict[bytes, bytes]:
    return {digest_of(DATA): DATA}


def prompt_of(*urls: str) -> ChatPrompt:
    return ChatPrompt([], media=tuple(Reference(IMAGE, b"", b"", {}, "input", url=url) for url in urls))


async def test_a_stored_medium_is_hashed_once_and_counted_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counting(data: bytes) -> bytes:
        hashed.append(data)
        return digest_of(data)

    monkeypatch.setattr(module, "digest_of", counting)
    lease = InFlightBytes(limit_bytes=10_000).lease()
    prompt = prompt_of(*[stored_url(digest_of(DATA))] * 5)

    found = await resolve(prompt, MediaReader(MediaConfig(), lease, fetch, at_once, stored))

    assert [(each.data, each.digest) for each in found.media] == [(DATA, digest_of(DATA))] * 5
    assert len([data for data in hashed if data == DATA]) == 1
    assert lease.size_bytes == 5 * len(DATA)


async def test_files_that_find_no_room_are_not_all_read(tmp_path: Path) -> None:
    picture = tmp_path / "picture"
    picture.write_bytes(DATA)
    read: list[int] = []

    async def counting(action: Callable[[], Media]) -> Media:
        read.append(1)
        return action()

    lease = InFlightBytes(limit_bytes=2 * len(DATA)).lease()
    reading = MediaReader(MediaConfig(folders=(str(tmp_path),)), lease, fetch, counting)

    with pytest.raises(Unavailable):
        await resolve(prompt_of(*[picture.as_uri()] * 8), reading)
    assert len(read) == 3


async def test_fetches_of_all_requests_wait_for_each_other() -> None:
    begun: list[str] = []
    may_end = asyncio.Event()

    async def slow(owner: str, url: str, limit_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
        begun.append(url)
        await may_end.wait()
        return url.encode()

    numbers = MediaNumbers()
    few = bounded(slow, numbers, 3, 3)
    fetches = [asyncio.ensure_future(few("", str(number), 10, 10, lambda _: None)) for number in range(8)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(begun) == numbers.fetching == 3
    fetches[0].cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(begun) == 4
    may_end.set()
    assert await asyncio.gather(*fetches[1:]) == [str(number).encode() for number in range(1, 8)]
    assert numbers.fetching == 0


async def test_fetches_of_a_key_leave_room_for_those_of_others() -> None:
    begun: list[str] = []
    may_end = asyncio.Event()

    async def slow(owner: str, url: str, limit_bytes: int, timeout_s: float, take: Callable[[int], None]) -> bytes:
        begun.append(owner)
        await may_end.wait()
        return b""

    few = bounded(slow, MediaNumbers(), 4, 2)
    owners = [*["one"] * 8, "other"]
    fetches = [asyncio.ensure_future(few(owner, "", 10, 10, lambda _: None)) for owner in owners]
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == ["one", "one", "other"]
    may_end.set()
    await asyncio.gather(*fetches)
