import asyncio
import stat
from collections.abc import Generator
from pathlib import Path

import pytest

from gateway.store import Store, StoreBroken, Stored


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
    made = Store(path, 1000, 500.0, clock)
    yield made
    made.close()


def stored(name: str, previous: str | None = None, tenant: str = "", body: bytes = b"{}") -> Stored:
    return Stored(name, tenant, previous, body, b"[]", [f"item_{name}"])


async def conversation(store: Store, name: str, tenant: str = "") -> list[str] | None:
    found = await store.conversation(tenant, name)
    return None if found is None else [one.id for one in found]


def test_what_was_kept_is_there_at_once_and_after_a_restart(path: Path, clock: Clock) -> None:
    first = Store(path, 1000, 500.0, clock)
    first.keep(stored("a", body=b'{"x":1}'))
    found = asyncio.run(first.get("", "a"))
    first.close()
    second = Store(path, 1000, 500.0, clock)
    again = asyncio.run(second.get("", "a"))
    second.close()

    assert found is not None
    assert again is not None
    assert found.body == again.body == b'{"x":1}'


def test_a_conversation_is_oldest_first_and_whole_or_nothing(store: Store) -> None:
    for one in (stored("a"), stored("b", "a"), stored("c", "b")):
        store.keep(one)

    assert asyncio.run(conversation(store, "c")) == ["a", "b", "c"]
    assert asyncio.run(store.delete("", "a"))
    assert asyncio.run(conversation(store, "c")) is None
    assert not asyncio.run(store.delete("", "a"))


def test_nothing_of_one_tenant_is_there_for_another(store: Store) -> None:
    store.keep(stored("a", tenant="alice"))

    assert asyncio.run(store.get("bob", "a")) is None
    assert asyncio.run(conversation(store, "a", "bob")) is None
    assert asyncio.run(store.owner("bob", "item_a")) is None
    assert not asyncio.run(store.delete("bob", "a"))
    assert asyncio.run(store.get("alice", "a")) is not None


def test_an_item_leads_to_its_response_until_that_is_deleted(store: Store) -> None:
    store.keep(stored("a"))
    found = asyncio.run(store.owner("", "item_a"))
    assert found is not None
    assert found.id == "a"

    asyncio.run(store.delete("", "a"))
    assert asyncio.run(store.owner("", "item_a")) is None


def test_what_is_old_goes_unless_it_was_used(store: Store, clock: Clock) -> None:
    store.keep(stored("a"))
    store.keep(stored("b"))
    # Now both have been written.
    assert asyncio.run(store.get("", "b")) is not None
    clock.now += 400
    assert asyncio.run(conversation(store, "a")) == ["a"]
    clock.now += 200

    assert asyncio.run(store.get("", "b")) is None
    assert asyncio.run(store.get("", "a")) is not None


def test_the_least_used_go_when_there_is_too_much(store: Store) -> None:
    for name in "abcde":
        store.keep(stored(name, body=b"x" * 290))
    found = [name for name in "abcde" if asyncio.run(store.get("", name)) is not None]

    assert found == ["c", "d", "e"]


def test_a_smaller_limit_holds_at_once_and_makes_no_file(path: Path, clock: Clock, tmp_path: Path) -> None:
    store = Store(path, 1000, 500.0, clock)
    for name in ("a", "b"):
        store.keep(stored(name, body=b"x" * 300))
    store.limit(400, 500.0)
    assert asyncio.run(store.get("", "a")) is None
    assert asyncio.run(store.get("", "b")) is not None
    store.limit(0, 500.0)
    assert not store.is_on
    assert asyncio.run(store.get("", "b")) is None
    store.close()

    unused = Store(tmp_path / "unused" / "responses.sqlite", 1000, 500.0, clock)
    unused.limit(10, 1.0)
    unused.close()
    assert not (tmp_path / "unused").exists()


def test_the_file_is_private(store: Store, path: Path) -> None:
    store.keep(stored("a"))
    asyncio.run(store.get("", "a"))

    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_damaged_file_is_put_aside(path: Path, clock: Clock) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    store = Store(path, 1000, 500.0, clock)
    store.keep(stored("a"))
    found = asyncio.run(store.get("", "a"))
    store.close()

    assert found is not None
    assert path.with_suffix(".damaged").exists()


def test_a_place_that_cannot_be_written_is_an_error_for_readers_only(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("")
    store = Store(tmp_path / "file" / "responses.sqlite", 1000, 500.0, clock)
    store.keep(stored("a"))
    with pytest.raises(StoreBroken):
        asyncio.run(store.get("", "a"))
    store.close()


def test_a_store_of_no_bytes_is_off(path: Path, clock: Clock) -> None:
    store = Store(path, 0, 500.0, clock)
    store.keep(stored("a"))
    store.close()

    assert not store.is_on
    assert not path.exists()
