"""Responses that clients may come back to: SQLite in a private file, one thread of its own, capped by size and age."""

import asyncio
import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.wall_clock import WallClock

log = logging.getLogger(__name__)

T = TypeVar("T")

# Of one conversation: what is longer is most likely a loop in a client's program.
CHAIN_MAX: Final = 10_000
# Calls, and bytes of responses, that wait for the disk; what comes while there are as many is not kept, or refused.
PENDING_MAX: Final = 512
PENDING_BYTES_MAX: Final = 128 * 1024 * 1024
_WAL_BYTES: Final = 4 * 1024 * 1024
_DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# `said` came later than the other tables: a response without a row there is as large as all that is kept of it.
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, used REAL NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, inputs BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used, size);
CREATE INDEX IF NOT EXISTS responses_tenant ON responses (tenant, used, size);
CREATE TABLE IF NOT EXISTS items (
    id TEXT NOT NULL, response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE, PRIMARY KEY (response, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_id ON items (id);
CREATE TABLE IF NOT EXISTS said (
    response TEXT PRIMARY KEY REFERENCES responses (id) ON DELETE CASCADE, size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS media (
    tenant TEXT NOT NULL, digest BLOB NOT NULL, data BLOB NOT NULL, PRIMARY KEY (tenant, digest)
);
CREATE TABLE IF NOT EXISTS media_of (
    response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE, tenant TEXT NOT NULL, digest BLOB NOT NULL,
    PRIMARY KEY (response, digest)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS media_of_digest ON media_of (tenant, digest);
CREATE TRIGGER IF NOT EXISTS media_unused AFTER DELETE ON media_of BEGIN
    DELETE FROM media WHERE tenant = OLD.tenant AND digest = OLD.digest AND NOT EXISTS
        (SELECT 1 FROM media_of WHERE tenant = OLD.tenant AND digest = OLD.digest);
END;
"""

_KEEP: Final = """
INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
    used = excluded.used, size = excluded.size, body = excluded.body, inputs = excluded.inputs
"""


class StoredResponse(Struct, frozen=True):
    """One response: `body` is its JSON, `inputs` the JSON list of its own input items.

    `item_ids` are those of all items in it, by which they can be referred to. `tenant` is who may read it. `said_bytes`
    is what a conversation that goes on from it has to read again: its items, in and out. `media` are the bytes that its
    input refers to, by their digests.
    """

    id: str
    tenant: str
    previous: str | None
    body: bytes
    inputs: bytes
    item_ids: Sequence[str] = ()
    said_bytes: int = 0
    media: Mapping[bytes, bytes] = {}


class StoredSizes(Struct, frozen=True):
    """Sizes of a stored response, before it is read."""

    previous: str | None
    body_bytes: int
    inputs_bytes: int


class StoreBroken(Exception):
    """The store cannot be read, or does not keep up; the log says why."""


class TooMuchSaid(Exception):
    """The stored items to read again exceed the caller's limit."""


class Store:
    """Calls are carried out in the order in which they are made, so a stored response is visible to the next call.

    Each tenant has `max_bytes`: the oldest of its own make room. What is used again counts as new, with the whole
    conversation before it. A damaged file is set aside, and a new one begun. `problems` counts what went wrong.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        max_age_s: float,
        clock: WallClock | None = None,
        problems: "Counter[str] | None" = None,
    ) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._now = clock or WallClock()
        self._problems: Counter[str] = Counter() if problems is None else problems
        self._thread = ThreadPoolExecutor(1, "store")
        self._is_closed = False
        self._lock = threading.Lock()
        # Under the lock: calls, and bytes to be kept, that have not been carried out.
        self._pending = 0
        self._pending_bytes = 0
        # The thread's own. Text was deleted that the write-ahead log may still hold.
        self._database: sqlite3.Connection | None = None
        self._has_traces = False

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def limit(self, max_bytes: int, max_age_s: float) -> None:
        """From now on these. What is over them goes, soon."""
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        if not self._is_closed:
            self._thread.submit(self._shrink_or_log)

    def keep(self, about_bytes: int, make: Callable[[], StoredResponse]) -> None:
        """Keep a response of about this size, made in the thread, soon.

        One that cannot be kept is logged and counted: its client has it anyway.
        """
        if not self.is_on or self._is_closed:
            return
        if not self._enter(about_bytes):
            self._problems["dropped"] += 1
            log.error("response not stored: the disk does not keep up")
            return
        self._thread.submit(self._keep_or_log, about_bytes, make)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Raises `StoreBroken`, as do all of these."""
        return await self._call(lambda: self._get(self._open(), tenant, response_id))

    async def sizes(self, tenant: str, response_id: str) -> StoredSizes | None:
        """Sizes of a response, without reading it."""
        return await self._call(lambda: self._sizes(self._open(), tenant, response_id))

    async def conversation(
        self, tenant: str, response_id: str, most_bytes: int, read: Callable[[StoredResponse], list[T]]
    ) -> tuple[int, list[T]] | None:
        """Size of a response and all before it, and the results of `read` for each, oldest first. Reads in the thread.

        None when any of them is gone. Raises `TooMuchSaid` before any is read.
        """
        return await self._call(lambda: self._conversation(tenant, response_id, most_bytes, read))

    async def owners(
        self, tenant: str, item_ids: Sequence[str], most_bytes: int, read: Callable[[StoredResponse], list[T]]
    ) -> list[T]:
        """Results of `read`, in the thread, for the newest response that holds an item of each of these ids.

        Each response is read once. Raises `TooMuchSaid` before any is read.
        """
        return await self._call(lambda: self._owners(tenant, item_ids, most_bytes, read))

    async def media(self, tenant: str, digests: Sequence[bytes], most_bytes: int) -> dict[bytes, bytes]:
        """The bytes of those media that are kept. Raises `TooMuchSaid` before any is read."""
        return await self._call(lambda: self._media(tenant, digests, most_bytes))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether it was there. Its text is in none of our files then."""
        return await self._call(lambda: self._delete(tenant, response_id))

    async def settle(self) -> None:
        """Return when all that was to be kept before is kept, or could not be."""
        await self._call(lambda: None)

    def close(self) -> None:
        """Finish what was begun, and close the file."""
        self._is_closed = True
        self._thread.submit(self._close)
        self._thread.shutdown()

    def _enter(self, size: int) -> bool:
        """Count one call, unless too many wait."""
        with self._lock:
            has_room = self._pending < PENDING_MAX and (
                not self._pending_bytes or self._pending_bytes + size <= PENDING_BYTES_MAX
            )
            if has_room:
                self._pending += 1
                self._pending_bytes += size
            return has_room

    def _leave(self, size: int) -> bool:
        """Whether nothing waits behind it."""
        with self._lock:
            self._pending -= 1
            self._pending_bytes -= size
            return self._pending == 0

    async def _call(self, action: Callable[[], T]) -> T:
        if not self._enter(0):
            self._problems["dropped"] += 1
            raise StoreBroken("too many calls wait")
        call = self._thread.submit(self._carry_out, action, 0)
        # Of a client that left while it waited, it is not carried out.
        call.add_done_callback(lambda call: self._leave(0) if call.cancelled() else None)
        try:
            return await asyncio.wrap_future(call)
        except (sqlite3.Error, OSError) as error:
            self._problems["failed"] += 1
            log.error("response store cannot be read: %s", error)
            raise StoreBroken from error

    # In the thread.

    def _carry_out(self, action: Callable[[], T], size: int) -> T:
        try:
            return self._healed(action)
        finally:
            if self._leave(size) and self._has_traces:
                self._truncate()

    def _healed(self, action: Callable[[], T]) -> T:
        """The action's result; once more, on a new file, if the one there is damaged."""
        try:
            return action()
        except (sqlite3.DatabaseError, msgspec.DecodeError, UnicodeDecodeError) as error:
            if not _is_damage(error):
                raise
            self._set_aside(error)
            return action()

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = self._connect()
        return self._database

    def _connect(self) -> sqlite3.Connection:
        # SQLite gives its side files the mode of this one.
        os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
        self._path.chmod(0o600)
        database = sqlite3.connect(self._path, isolation_level=None)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("PRAGMA secure_delete = ON")
            database.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            database.executescript(_SCHEMA)
            # Nearly all of the file. That of `items` finds fault with a sound one in SQLite 3.40.
            (verdict,) = database.execute("PRAGMA quick_check(responses)").fetchone()
            if verdict != "ok":
                raise Damaged(verdict)
            (newest,) = database.execute("SELECT MAX(used) FROM responses").fetchone()
        except sqlite3.Error:
            database.close()
            raise
        if newest is not None:
            self._now.resume(newest)
        return database

    def _set_aside(self, error: Exception) -> None:
        self._problems["damaged"] += 1
        aside = self._path.with_suffix(".damaged")
        log.error("response store is damaged (%s): it is set aside as %s, and a new one is created", error, aside)
        self._close()
        self._path.replace(aside)
        for suffix in ("-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _truncate(self) -> None:
        """Empty the write-ahead log, where what was deleted can still be read."""
        try:
            self._open().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._has_traces = False
        except (sqlite3.Error, OSError) as error:
            log.error("write-ahead log of the response store cannot be emptied: %s", error)

    def _keep_or_log(self, size: int, make: Callable[[], StoredResponse]) -> None:
        try:
            with ExitStack() as undo:
                undo.callback(self._leave, size)
                stored = make()
                undo.pop_all()
            self._carry_out(lambda: self._keep(self._open(), stored), size)
        except (sqlite3.Error, OSError) as error:
            self._problems["failed"] += 1
            log.error("response not stored: %s", error)
        except Exception:  # The root of a call in this thread.
            self._problems["failed"] += 1
            log.exception("response not stored")

    def _shrink_or_log(self) -> None:
        try:
            if self._path.exists():
                self._healed(self._shrink)
                self._truncate()
        except (sqlite3.Error, OSError) as error:
            self._problems["failed"] += 1
            log.error("response store could not be shrunk: %s", error)

    def _shrink(self) -> None:
        database = self._open()
        tenants = database.execute("SELECT DISTINCT tenant FROM responses").fetchall()
        with database:
            database.execute("BEGIN")
            for (tenant,) in tenants:
                self._evict(database, tenant)

    def _keep(self, database: sqlite3.Connection, stored: StoredResponse) -> None:
        size = len(stored.body) + len(stored.inputs) + sum(map(len, stored.media.values()))
        row = (stored.id, stored.tenant, stored.previous, self._now(), size, stored.body, stored.inputs)
        with database:
            database.execute("BEGIN")
            # One that is kept again, further on, is not deleted first: its media would go and come back with it.
            database.execute(_KEEP, row)
            database.execute("INSERT OR REPLACE INTO said VALUES (?, ?)", (stored.id, stored.said_bytes or size))
            items = [(item_id, stored.id) for item_id in stored.item_ids]
            database.executemany("INSERT OR IGNORE INTO items VALUES (?, ?)", items)
            for digest, data in stored.media.items():
                database.execute("INSERT OR IGNORE INTO media VALUES (?, ?, ?)", (stored.tenant, digest, data))
                row = (stored.id, stored.tenant, digest)
                database.execute("INSERT OR IGNORE INTO media_of VALUES (?, ?, ?)", row)
            self._evict(database, stored.tenant)

    def _evict(self, database: sqlite3.Connection, tenant: str) -> None:
        """Delete the oldest of all tenants, and the least used of this one, until the rest is small enough."""
        cursor = database.execute("DELETE FROM responses WHERE used < ?", (self._now() - self._max_age_s,))
        self._has_traces |= cursor.rowcount > 0
        sql = "SELECT COALESCE(SUM(size), 0) FROM responses WHERE tenant = ?"
        (total,) = database.execute(sql, (tenant,)).fetchone()
        while total > self._max_bytes:
            sql = "SELECT id, size FROM responses WHERE tenant = ? ORDER BY used LIMIT 16"
            for response_id, size in database.execute(sql, (tenant,)).fetchall():
                database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
                self._has_traces = True
                total -= size
                if total <= self._max_bytes:
                    break

    def _get(self, database: sqlite3.Connection, tenant: str, response_id: str) -> StoredResponse | None:
        row = database.execute(
            "SELECT id, tenant, previous, body, inputs FROM responses WHERE id = ? AND tenant = ? AND used >= ?",
            (response_id, tenant, self._now() - self._max_age_s),
        ).fetchone()
        return None if row is None else StoredResponse(*row)

    def _sizes(self, database: sqlite3.Connection, tenant: str, response_id: str) -> StoredSizes | None:
        row = database.execute(
            "SELECT previous, length(body), length(inputs) FROM responses WHERE id = ? AND tenant = ? AND used >= ?",
            (response_id, tenant, self._now() - self._max_age_s),
        ).fetchone()
        return None if row is None else StoredSizes(*row)

    def _conversation(
        self, tenant: str, response_id: str, most_bytes: int, read: Callable[[StoredResponse], list[T]]
    ) -> tuple[int, list[T]] | None:
        database = self._open()
        size = 0
        ids: list[str] = []
        at: str | None = response_id
        while at is not None and len(ids) < CHAIN_MAX:
            row = database.execute(
                "SELECT previous, COALESCE(said.size, responses.size) FROM responses"
                " LEFT JOIN said ON said.response = responses.id WHERE id = ? AND tenant = ? AND used >= ?",
                (at, tenant, self._now() - self._max_age_s),
            ).fetchone()
            if row is None:
                return None
            ids.append(at)
            at, size = row[0], size + row[1]
            if size > most_bytes:
                raise TooMuchSaid
        with database:
            database.execute("BEGIN")
            used = self._now()
            database.executemany("UPDATE responses SET used = ? WHERE id = ?", [(used, stored_id) for stored_id in ids])
        parts: list[T] = []
        for stored_id in reversed(ids):
            # One at a time: each may be as large as a body.
            stored = self._get(database, tenant, stored_id)
            if stored is None:
                return None
            parts += read(stored)
        return size, parts

    def _owners(
        self, tenant: str, item_ids: Sequence[str], most_bytes: int, read: Callable[[StoredResponse], list[T]]
    ) -> list[T]:
        database = self._open()
        sizes: dict[str, int] = {}
        for item_id in dict.fromkeys(item_ids):
            row = database.execute(
                "SELECT items.response, COALESCE(said.size, responses.size) FROM items"
                " JOIN responses ON responses.id = items.response LEFT JOIN said ON said.response = responses.id"
                " WHERE items.id = ? AND tenant = ? ORDER BY used DESC LIMIT 1",
                (item_id, tenant),
            ).fetchone()
            if row is not None:
                sizes[row[0]] = row[1]
        if sum(sizes.values()) > most_bytes:
            raise TooMuchSaid
        owners = (self._get(database, tenant, response_id) for response_id in sizes)
        return [one for stored in owners if stored is not None for one in read(stored)]

    def _media(self, tenant: str, digests: Sequence[bytes], most_bytes: int) -> dict[bytes, bytes]:
        database = self._open()
        sizes: dict[bytes, int] = {}
        for digest in dict.fromkeys(digests):
            sql = "SELECT length(data) FROM media WHERE tenant = ? AND digest = ?"
            if (row := database.execute(sql, (tenant, digest)).fetchone()) is not None:
                sizes[digest] = row[0]
        if sum(sizes.values()) > most_bytes:
            raise TooMuchSaid
        sql = "SELECT data FROM media WHERE tenant = ? AND digest = ?"
        return {digest: database.execute(sql, (tenant, digest)).fetchone()[0] for digest in sizes}

    def _delete(self, tenant: str, response_id: str) -> bool:
        sql = "DELETE FROM responses WHERE id = ? AND tenant = ?"
        is_found = self._open().execute(sql, (response_id, tenant)).rowcount > 0
        if is_found:
            self._truncate()
        return is_found


class Damaged(sqlite3.DatabaseError):
    """SQLite's own check of the file found something."""


def _is_damage(error: Exception) -> bool:
    """Locked, full, not allowed are not the file's fault. What is there no longer decodes is."""
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, Damaged):
        code: int = getattr(error, "sqlite_errorcode", 0)
        return (code & 0xFF) in _DAMAGED
    return True
