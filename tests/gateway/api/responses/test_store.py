import asyncio
import contextlib
import os
import sqlite3
import stat
import threading
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import msgspec
import pytest

from gateway.api.responses.store import PENDING_BYTES_MAX, Store, StoreBroken, StoredResponse, StoredTooLarge
from gateway.disk_and_clock import JUMP_S, TRUST_S, WallClock
from tests.support.scale import patient


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "responses.sqlite"


@pytest.fixture
def store(path: Path, clock: Clock) -> Generator[Store, None, None]:
    made = Store(path, 1000, 500.0, WallClock(clock, clock))
    yield made
    made.close()


def stored(name: str, previous: str | None = None, tenant: str = "", body: bytes = b"{}") -> StoredResponse:
    return StoredResponse(name, tenant, previous, body, b"[]", [f"item_{name}"])


def keep(store: Store, one: StoredResponse) -> None:
    store.keep(len(one.body), lambda: one)


async def get(store: Store, tenant: str, name: str) -> StoredResponse | None:
    return await store.read(lambda kept: kept.get(tenant, name))


async def delete(store: Store, tenant: str, name: str) -> bool:
    return await store.read(lambda kept: kept.delete(tenant, name))


async def media(store: Store, tenant: str, digests: list[bytes], max_bytes: int) -> dict[bytes, bytes]:
    return await store.read(lambda kept: kept.media(tenant, digests, max_bytes))


async def conversation(store: Store, name: str, tenant: str = "", max_bytes: int = 1000) -> list[str] | None:
    found = await store.read(lambda kept: kept.conversation(tenant, name, max_bytes, lambda stored: [stored.id]))
    return None if found is None else found[1]


async def owners(store: Store, *item_ids: str, tenant: str = "", max_bytes: int = 1000) -> list[str]:
    return await store.read(lambda kept: kept.owners(tenant, item_ids, max_bytes, lambda stored: [stored.id]))


def test_what_was_kept_is_there_at_once_and_after_a_restart(path: Path, clock: Clock) -> None:
    first = Store(path, 1000, 500.0, WallClock(clock, clock))
    keep(first, stored("a", body=b'{"x":1}'))
    found = asyncio.run(get(first, "", "a"))
    first.close()
    second = Store(path, 1000, 500.0, WallClock(clock, clock))
    again = asyncio.run(get(second, "", "a"))
    second.close()

    assert found is not None
    assert again is not None
    assert found.body == again.body == b'{"x":1}'


def test_one_that_is_kept_again_further_on_keeps_its_items_and_its_media_where_they_are(
    store: Store, path: Path
) -> None:
    async def use() -> None:
        first = stored("a", body=b'"begun"')
        keep(store, msgspec.structs.replace(first, media={b"d": b"picture"}))
        assert await get(store, "", "a") is not None
        with contextlib.closing(sqlite3.connect(path)) as database:
            database.execute("CREATE TABLE gone (n)")
            database.execute("CREATE TRIGGER t AFTER DELETE ON media BEGIN INSERT INTO gone VALUES (1); END")
        keep(store, msgspec.structs.replace(first, body=b'"ended"', item_ids=["item_b"], media={b"d": b"picture"}))
        again = await get(store, "", "a")
        assert again is not None
        assert again.body == b'"ended"'
        assert await owners(store, "item_a", "item_b") == ["a"]
        assert await media(store, "", [b"d"], 1000) == {b"d": b"picture"}
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("SELECT COUNT(*) FROM gone").fetchone() == (0,)

    asyncio.run(use())


def test_a_conversation_is_oldest_first_and_whole_or_nothing(store: Store) -> None:
    for one in (stored("a"), stored("b", "a"), stored("c", "b")):
        keep(store, one)

    assert asyncio.run(conversation(store, "c")) == ["a", "b", "c"]
    assert asyncio.run(delete(store, "", "a"))
    assert asyncio.run(conversation(store, "c")) is None
    assert not asyncio.run(delete(store, "", "a"))


def test_nothing_of_one_tenant_is_there_for_another(store: Store) -> None:
    keep(store, stored("a", tenant="alice"))

    assert asyncio.run(get(store, "bob", "a")) is None
    assert asyncio.run(conversation(store, "a", "bob")) is None
    assert asyncio.run(owners(store, "item_a", tenant="bob")) == []
    assert not asyncio.run(delete(store, "bob", "a"))
    assert asyncio.run(get(store, "alice", "a")) is not None


def test_an_item_leads_to_its_response_until_that_is_deleted(store: Store) -> None:
    keep(store, stored("a"))
    keep(store, stored("b"))
    assert asyncio.run(owners(store, "item_b", "item_a", "item_b", "item_c")) == ["b", "a"]

    asyncio.run(delete(store, "", "a"))
    assert asyncio.run(owners(store, "item_a")) == []


def test_what_is_old_goes_unless_it_was_used(store: Store, clock: Clock) -> None:
    keep(store, stored("a"))
    keep(store, stored("b"))
    # Now both have been written.
    assert asyncio.run(get(store, "", "b")) is not None
    clock.now += 400
    assert asyncio.run(conversation(store, "a")) == ["a"]
    clock.now += 200

    assert asyncio.run(get(store, "", "b")) is None
    assert asyncio.run(get(store, "", "a")) is not None


def test_the_least_used_go_when_there_is_too_much(store: Store) -> None:
    for name in "abcde":
        keep(store, stored(name, body=b"x" * 290))
    found = [name for name in "abcde" if asyncio.run(get(store, "", name)) is not None]

    assert found == ["c", "d", "e"]


def test_a_smaller_limit_holds_at_once_and_makes_no_file(path: Path, clock: Clock, tmp_path: Path) -> None:
    store = Store(path, 1000, 500.0, WallClock(clock, clock))
    for name in ("a", "b"):
        keep(store, stored(name, body=b"x" * 300))
    store.limit(400, 500.0)
    assert asyncio.run(get(store, "", "a")) is None
    assert asyncio.run(get(store, "", "b")) is not None
    store.limit(0, 500.0)
    assert not store.is_on
    assert asyncio.run(get(store, "", "b")) is None
    store.close()

    unused = Store(tmp_path / "unused" / "responses.sqlite", 1000, 500.0, WallClock(clock, clock))
    unused.limit(10, 1.0)
    unused.close()
    assert not (tmp_path / "unused").exists()


def test_the_file_is_private(store: Store, path: Path) -> None:
    keep(store, stored("a"))
    asyncio.run(get(store, "", "a"))

    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_damaged_file_is_put_aside(path: Path, clock: Clock) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    store = Store(path, 1000, 500.0, WallClock(clock, clock))
    keep(store, stored("a"))
    found = asyncio.run(get(store, "", "a"))
    store.close()

    assert found is not None
    assert path.with_suffix(".damaged").exists()


def test_a_place_that_cannot_be_written_is_an_error_for_readers_only(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "responses.sqlite", 1000, 500.0, WallClock(clock, clock))
    keep(store, stored("a"))
    with pytest.raises(StoreBroken):
        asyncio.run(get(store, "", "a"))
    store.close()


def test_a_response_that_is_not_stored_is_reported_and_may_be_stored_later(tmp_path: Path, clock: Clock) -> None:
    place = tmp_path / "file"
    place.write_text("")
    store = Store(place / "responses.sqlite", 1000, 500.0, WallClock(clock, clock))
    assert not store.keep(1, lambda: stored("a")).result()
    place.unlink()
    assert store.keep(1, lambda: stored("a")).result()
    store.close()


def test_a_store_of_no_bytes_is_off(path: Path, clock: Clock) -> None:
    store = Store(path, 0, 500.0, WallClock(clock, clock))
    keep(store, stored("a"))
    store.close()

    assert not store.is_on
    assert not path.exists()


def test_one_tenants_writes_never_evict_anothers(store: Store) -> None:
    keep(store, stored("old", tenant="alice", body=b"x" * 300))
    for number in range(20):
        keep(store, stored(f"b{number}", tenant="bob", body=b"y" * 300))

    assert asyncio.run(get(store, "alice", "old")) is not None
    left = [number for number in range(20) if asyncio.run(get(store, "bob", f"b{number}")) is not None]
    assert left == [17, 18, 19]


def test_a_conversation_larger_than_is_asked_for_is_not_read(store: Store) -> None:
    read: list[str] = []
    for one in (stored("a", body=b"x" * 300), stored("b", "a", body=b"y" * 300)):
        keep(store, one)

    def note(one: StoredResponse) -> list[str]:
        read.append(one.id)
        return []

    assert asyncio.run(store.read(lambda kept: kept.conversation("", "b", 604, note))) == (604, [])
    assert read == ["a", "b"]
    with pytest.raises(StoredTooLarge):
        asyncio.run(store.read(lambda kept: kept.conversation("", "b", 603, note)))
    with pytest.raises(StoredTooLarge):
        asyncio.run(store.read(lambda kept: kept.owners("", ["item_a", "item_b"], 603, note)))
    assert read == ["a", "b"]


def test_what_a_conversation_says_counts_not_what_is_kept_beside_it(store: Store) -> None:
    keep(store, StoredResponse("a", "", None, b"x" * 700, b"[]", items_bytes=10))

    assert asyncio.run(conversation(store, "a", max_bytes=10)) == ["a"]
    with pytest.raises(StoredTooLarge):
        asyncio.run(conversation(store, "a", max_bytes=9))


def traces(path: Path, word: bytes) -> list[str]:
    return [file.name for file in path.parent.iterdir() if word in file.read_bytes()]


def test_deleted_text_is_in_no_file_any_more(store: Store, path: Path) -> None:
    keep(store, stored("a", body=b'"marzipan"' + b"x" * 300))
    assert asyncio.run(get(store, "", "a")) is not None
    assert traces(path, b"marzipan") != []
    assert asyncio.run(delete(store, "", "a"))

    assert traces(path, b"marzipan") == []


def test_evicted_text_is_in_no_file_any_more(path: Path, clock: Clock) -> None:
    store = Store(path, 100_000, 500.0, WallClock(clock, clock))
    keep(store, stored("a", body=b"marzipan" * 5000))
    for name in "bcd":
        keep(store, stored(name, body=b"x" * 40_000))
    assert asyncio.run(get(store, "", "a")) is None
    # What is evicted goes when nothing waits; the next call comes after it.
    assert asyncio.run(get(store, "", "d")) is not None

    assert traces(path, b"marzipan") == []
    store.close()


@pytest.mark.parametrize("is_open", [True, False])
def test_a_damaged_page_costs_what_was_kept_and_nothing_that_comes(path: Path, clock: Clock, is_open: bool) -> None:
    problems: Counter[str] = Counter()
    store = Store(path, 10_000_000, 5000.0, WallClock(clock, clock), problems)
    # More than SQLite remembers of the file.
    for number in range(60):
        keep(store, stored(f"a{number}", body=b"x" * 100_000))
    assert asyncio.run(get(store, "", "a0")) is not None
    if not is_open:
        store.close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        # All but the first page, whose damage would be seen at once.
        file.seek(4096)
        file.write(os.urandom(size - 4096))
    if not is_open:
        store = Store(path, 10_000_000, 5000.0, WallClock(clock, clock), problems)

    assert None in [asyncio.run(get(store, "", f"a{number}")) for number in range(60)]
    keep(store, stored("b"))
    assert asyncio.run(get(store, "", "b")) is not None
    assert problems == {"damaged": 1}
    assert path.with_suffix(".damaged").exists()
    store.close()


def test_what_no_longer_decodes_is_damage_too(store: Store) -> None:
    def decoded(one: StoredResponse) -> list[object]:
        return [msgspec.json.decode(one.body)]

    keep(store, stored("a", body=b"\xff"))

    assert asyncio.run(store.read(lambda kept: kept.conversation("", "a", 1000, decoded))) is None


def test_what_the_disk_does_not_keep_up_with_is_dropped_and_counted(path: Path, clock: Clock) -> None:
    problems: Counter[str] = Counter()
    store = Store(path, 1000, 500.0, WallClock(clock, clock), problems)
    is_held = threading.Event()

    def slow() -> StoredResponse:
        is_held.wait(patient(60))
        return stored("a")

    store.keep(PENDING_BYTES_MAX, slow)
    keep(store, stored("b"))
    is_held.set()

    assert asyncio.run(get(store, "", "a")) is not None
    assert asyncio.run(get(store, "", "b")) is None
    assert problems == {"dropped": 1}
    store.close()


def test_a_clock_that_jumps_forward_deletes_nothing_until_it_has_stayed_there(path: Path) -> None:
    wall, monotonic = Hands(1000.0), Hands(0.0)
    store = Store(path, 1000, 10 * JUMP_S, WallClock(wall, monotonic))
    keep(store, stored("a"))
    assert asyncio.run(get(store, "", "a")) is not None
    wall.now += 1e9
    keep(store, stored("b"))
    assert asyncio.run(get(store, "", "a")) is not None
    store.close()

    # Nor does a restart make it believed.
    store = Store(path, 1000, 10 * JUMP_S, WallClock(wall, monotonic))
    store.limit(1000, 10 * JUMP_S)
    assert asyncio.run(get(store, "", "a")) is not None
    monotonic.now += TRUST_S + 1
    keep(store, stored("c"))
    assert asyncio.run(get(store, "", "a")) is None
    assert asyncio.run(get(store, "", "c")) is not None
    store.close()


class Hands:
    """A clock that stands until it is moved."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def test_a_call_of_a_client_that_left_while_it_waited_takes_no_room(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.api.responses.store.PENDING_MAX", 2)

    async def leave() -> None:
        is_free = threading.Event()

        def late() -> StoredResponse:
            assert is_free.wait(patient(60))
            return stored("late")

        store.keep(2, late)
        call = asyncio.create_task(get(store, "", "late"))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        is_free.set()
        assert await get(store, "", "late") is not None

    for _ in range(3):
        asyncio.run(leave())


def test_a_response_that_cannot_be_made_takes_no_room(store: Store) -> None:
    def broken() -> StoredResponse:
        raise ValueError("no JSON")

    store.keep(PENDING_BYTES_MAX, broken)
    assert asyncio.run(get(store, "", "a")) is None
    keep(store, stored("a"))
    assert asyncio.run(get(store, "", "a")) is not None
