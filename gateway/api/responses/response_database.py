"""SQLite database of stored responses: its schema, queries and eviction. Used by the store's thread only."""

import os
import sqlite3
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

from msgspec import Struct

from gateway.disk import SYSTEM_DISK, Disk
from gateway.wall_clock import WallClock

T = TypeVar("T")

# Maximum responses of a conversation. A longer one is most likely caused by a loop in a client's program.
CONVERSATION_RESPONSES_MAX: Final = 10_000
_WAL_BYTES: Final = 4 * 1024 * 1024
_DAMAGE_CODES: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
# Files of older versions have no table `said`, so their responses have no row in it. The size of such a response's
# items is taken to be the size of all its columns.
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
_RESPONSES: Final = "(responses LEFT JOIN said ON said.response = responses.id)"
_ITEMS_BYTES: Final = "COALESCE(said.size, responses.size)"
# The row is updated, because replacing it would delete its media and insert them again.
_UPSERT: Final = """
INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
    used = excluded.used, size = excluded.size, body = excluded.body, inputs = excluded.inputs
"""


class StoredResponse(Struct, frozen=True):
    """One response. `body` is its JSON; `inputs` is the JSON list of its own input items.

    Only `tenant` may read it. `item_ids` are the ids by which requests can refer to its input and output items,
    `items_bytes` is the total size of these items, and `media` maps digests to the bytes that its input refers to.
    """

    id: str
    tenant: str
    previous: str | None
    body: bytes
    inputs: bytes
    item_ids: Sequence[str] = ()
    items_bytes: int = 0
    media: Mapping[bytes, bytes] = {}


class StoredSizes(Struct, frozen=True):
    """Sizes of a stored response. They are read before the response itself."""

    previous: str | None
    body_bytes: int
    inputs_bytes: int


class StoredTooLarge(Exception):
    """Raised when the stored items or media to be read exceed the caller's limit."""


class Damaged(sqlite3.DatabaseError):
    """Raised when SQLite's own check of the file found an error."""


class ResponseDatabase:
    """Database of the stored responses of all tenants. It is opened at the first use.

    Methods raise `sqlite3.Error` and `OSError`. Each tenant may store `max_bytes`; beyond that, its least recently used
    responses are evicted. Continuing a conversation counts as a use of all its responses. `has_traces` is set while
    deleted text may still be in the write-ahead log.
    """

    def __init__(
        self, path: Path, max_bytes: int, max_age_s: float, clock: WallClock, disk: Disk = SYSTEM_DISK
    ) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.max_age_s = max_age_s
        self.has_traces = False
        self._now = clock
        self._disk = disk
        self._connection: sqlite3.Connection | None = None

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        row = self._row("id, tenant, previous, body, inputs", tenant, response_id)
        return None if row is None else StoredResponse(*row)

    def sizes(self, tenant: str, response_id: str) -> StoredSizes | None:
        row = self._row("previous, length(body), length(inputs)", tenant, response_id)
        return None if row is None else StoredSizes(*row)

    def conversation(
        self, tenant: str, response_id: str, max_bytes: int, read: Callable[[StoredResponse], list[T]]
    ) -> tuple[int, list[T]] | None:
        """Return two things for a response and its predecessors: their total size, and the result of `read` for each,
        oldest first.

        Returns None if any of them is gone. Raises `StoredTooLarge` before any is read.
        """
        size = 0
        ids: list[str] = []
        previous: str | None = response_id
        while previous is not None and len(ids) < CONVERSATION_RESPONSES_MAX:
            row = self._row(f"previous, {_ITEMS_BYTES}", tenant, previous)
            if row is None:
                return None
            ids.append(previous)
            previous, size = row[0], size + row[1]
            if size > max_bytes:
                raise StoredTooLarge
        with self._transaction() as database:
            used = self._now()
            database.executemany("UPDATE responses SET used = ? WHERE id = ?", [(used, each) for each in ids])
        return size, self._read_each(tenant, reversed(ids), read)

    def owners(
        self, tenant: str, item_ids: Sequence[str], max_bytes: int, read: Callable[[StoredResponse], list[T]]
    ) -> list[T]:
        """Return the results of `read` for the responses that have these item ids.

        If several responses have the same item id, the most recently used one counts. Each response is read once.
        Raises `StoredTooLarge` before any is read.
        """
        sql = (
            f"SELECT responses.id, {_ITEMS_BYTES} FROM items JOIN {_RESPONSES} ON responses.id = items.response"
            " WHERE tenant = ? AND items.id = ? ORDER BY used DESC LIMIT 1"
        )
        return self._read_each(tenant, self._checked_sizes(sql, tenant, item_ids, max_bytes), read)

    def media(self, tenant: str, digests: Sequence[bytes], max_bytes: int) -> dict[bytes, bytes]:
        """Return the stored bytes with these digests. Raises `StoredTooLarge` before any is read."""
        sql = "SELECT digest, length(data) FROM media WHERE tenant = ? AND digest = ?"
        sizes = self._checked_sizes(sql, tenant, digests, max_bytes)
        sql = "SELECT data FROM media WHERE tenant = ? AND digest = ?"
        return {digest: self._open().execute(sql, (tenant, digest)).fetchone()[0] for digest in sizes}

    def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a response, also from the write-ahead log. Returns whether the response existed."""
        sql = "DELETE FROM responses WHERE id = ? AND tenant = ?"
        is_found = self._open().execute(sql, (response_id, tenant)).rowcount > 0
        if is_found:
            # The response is deleted although this may fail. `has_traces` then remains set.
            self.has_traces = True
            with suppress(sqlite3.Error):
                self.truncate_log()
        return is_found

    def keep(self, stored: StoredResponse) -> None:
        """Insert or update a response, and evict others of its tenant if the limit requires it."""
        size = len(stored.body) + len(stored.inputs) + sum(map(len, stored.media.values()))
        with self._transaction() as database:
            row = (stored.id, stored.tenant, stored.previous, self._now(), size, stored.body, stored.inputs)
            database.execute(_UPSERT, row)
            database.execute("INSERT OR REPLACE INTO said VALUES (?, ?)", (stored.id, stored.items_bytes or size))
            items = [(item_id, stored.id) for item_id in stored.item_ids]
            database.executemany("INSERT OR IGNORE INTO items VALUES (?, ?)", items)
            media = [(stored.tenant, digest, data) for digest, data in stored.media.items()]
            database.executemany("INSERT OR IGNORE INTO media VALUES (?, ?, ?)", media)
            media_of = [(stored.id, stored.tenant, digest) for digest in stored.media]
            database.executemany("INSERT OR IGNORE INTO media_of VALUES (?, ?, ?)", media_of)
            self._evict(database, stored.tenant)

    def shrink(self, tenants: frozenset[str] | None = None) -> None:
        """Delete responses that are too old, responses of each tenant beyond its limit, and those of tenants that are
        not among `tenants`; None means that all may stay.
        """
        with self._transaction() as database:
            for (tenant,) in database.execute("SELECT DISTINCT tenant FROM responses").fetchall():
                self._evict(database, tenant)
                if tenants is not None and tenant not in tenants:
                    database.execute("DELETE FROM responses WHERE tenant = ?", (tenant,))
                    self.has_traces = True

    def truncate_log(self) -> None:
        """Empty the write-ahead log, in which deleted text can still be read."""
        self._open().execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self.has_traces = False

    def set_aside(self, path: Path) -> None:
        """Move the file to `path`; the next use creates a new one."""
        self.close()
        self.path.replace(path)
        for suffix in ("-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _row(self, columns: str, tenant: str, response_id: str) -> tuple[Any, ...] | None:
        """Return columns of a tenant's response. None if there is no such response or it is too old."""
        sql = f"SELECT {columns} FROM {_RESPONSES} WHERE id = ? AND tenant = ? AND used >= ?"
        return self._open().execute(sql, (response_id, tenant, self._now() - self.max_age_s)).fetchone()

    def _checked_sizes(self, sql: str, tenant: str, keys: Sequence[str | bytes], max_bytes: int) -> dict[Any, int]:
        """Return sizes by id. `sql` finds the row for a tenant and a key. Raises `StoredTooLarge` if their sum is too
        large.
        """
        database = self._open()
        rows = (database.execute(sql, (tenant, key)).fetchone() for key in dict.fromkeys(keys))
        sizes = dict(row for row in rows if row is not None)
        if sum(sizes.values()) > max_bytes:
            raise StoredTooLarge
        return sizes

    def _read_each(
        self, tenant: str, response_ids: Iterable[str], read: Callable[[StoredResponse], list[T]]
    ) -> list[T]:
        """Return the result of `read` for each response. They are loaded one at a time, because each may be as large as
        a body.
        """
        responses = (self.get(tenant, response_id) for response_id in response_ids)
        return [item for stored in responses if stored is not None for item in read(stored)]

    def _evict(self, database: sqlite3.Connection, tenant: str) -> None:
        """Delete responses that are too old, and this tenant's least recently used responses beyond its limit."""
        cursor = database.execute("DELETE FROM responses WHERE used < ?", (self._now() - self.max_age_s,))
        self.has_traces |= cursor.rowcount > 0
        sql = "SELECT COALESCE(SUM(size), 0) FROM responses WHERE tenant = ?"
        (total,) = database.execute(sql, (tenant,)).fetchone()
        while total > self.max_bytes:
            sql = "SELECT id, size FROM responses WHERE tenant = ? ORDER BY used LIMIT 1"
            response_id, size = database.execute(sql, (tenant,)).fetchone()
            database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
            self.has_traces = True
            total -= size

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection, None, None]:
        database = self._open()
        with database:
            database.execute("BEGIN")
            yield database

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._connection = self._connect()
        return self._connection

    def _connect(self) -> sqlite3.Connection:
        # SQLite creates its additional files with the mode of this file.
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        self.path.chmod(0o600)
        database = self._disk.connect(self.path)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute("PRAGMA foreign_keys = ON")
            database.execute("PRAGMA secure_delete = ON")
            database.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            database.executescript(_SCHEMA)
            # Only `responses`, which is nearly all of the file, is checked, because SQLite 3.40 reports errors in an
            # intact `items` table.
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


def is_damage(error: Exception) -> bool:
    """Whether an error means that the file is damaged, for example because its content cannot be decoded.

    A file that is locked, full or not permitted is not damaged.
    """
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, Damaged):
        code: int = getattr(error, "sqlite_errorcode", 0)
        return (code & 0xFF) in _DAMAGE_CODES
    return True
