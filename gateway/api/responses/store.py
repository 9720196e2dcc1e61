"""Store of responses that clients may retrieve or continue. One thread uses an SQLite database, limited by size and
age.

SQLite database of stored responses: its schema, queries and eviction. Used by the store's thread only.
"""

import asyncio
import logging
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.disk_and_clock import SYSTEM_DISK, Disk, MakeThread, WallClock, single_thread

log = logging.getLogger(__name__)

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


A = TypeVar("A")

# Maximum number of calls, and maximum size of responses, that wait for the disk. Beyond that, responses are not stored
# and reads are refused.
# A stored response that is not used for this long is deleted.
STORE_AGE_S: Final = 30 * 86400.0
PENDING_MAX: Final = 512
PENDING_BYTES_MAX: Final = 128 * 1024 * 1024


class StoreBroken(Exception):
    """Raised when the store cannot be read, or is too slow; the log has the reason."""


class Store:
    """Queue of calls to the database. They run in order, so a response that was stored is visible to the next call.

    A damaged file is moved aside and a new one is created. `problems` counts damaged files, and calls that were dropped
    or failed.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        max_age_s: float,
        clock: WallClock | None = None,
        problems: "Counter[str] | None" = None,
        make_thread: MakeThread = single_thread,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        self._path = path
        self._database = ResponseDatabase(path, max_bytes, max_age_s, clock or WallClock(), disk)
        self._problems: Counter[str] = Counter() if problems is None else problems
        self._thread = make_thread("store")
        # Tenants whose responses are stored; None means all. Used by the thread only.
        self._tenants: frozenset[str] | None = None
        self._is_closed = False
        # Protects the number of waiting calls and the size of their data.
        self._lock = threading.Lock()
        self._pending = 0
        self._pending_bytes = 0

    @property
    def is_on(self) -> bool:
        return self._database.max_bytes > 0

    def limit(self, max_bytes: int, max_age_s: float) -> None:
        """Change the limits. Responses that exceed them are deleted soon afterwards."""
        self._database.max_bytes, self._database.max_age_s = max_bytes, max_age_s
        if not self._is_closed:
            self._thread.submit(self._shrink_or_log)

    def keep_tenants(self, tenants: frozenset[str]) -> None:
        """Delete the responses of all other tenants soon, and store none of them from now on."""
        if not self._is_closed:
            self._thread.submit(self._keep_only, tenants)

    def keep(self, about_bytes: int, make: Callable[[], StoredResponse]) -> Future[bool]:
        """Queue a response of about `about_bytes` for storing. The thread calls `make`, which returns the response.

        A response that cannot be stored is logged and counted, and the result is False. One whose tenant is gone is
        dropped.
        """
        if not self.is_on or self._is_closed:
            return done(True)
        if not self._enter(about_bytes):
            self._problems["dropped"] += 1
            log.error("response not stored: the disk does not keep up")
            return done(False)
        return self._submit(about_bytes, self._keep_or_log, make)

    async def read(self, action: Callable[[ResponseDatabase], T]) -> T:
        """Call `action` in the thread and return its result. Raises `StoreBroken`, and any error of `action`."""
        if not self._enter(0):
            self._problems["dropped"] += 1
            raise StoreBroken("too many calls wait")
        try:
            # A waiting call is cancelled if its client leaves.
            return await asyncio.wrap_future(self._submit(0, self._run, action))
        except (sqlite3.Error, OSError) as error:
            self._problems["failed"] += 1
            log.error("response store cannot be read: %s", error)
            raise StoreBroken from error

    async def wait_stored(self) -> None:
        """Return once all responses that were queued before are stored or have failed. Raises `StoreBroken`."""
        await self.read(lambda _: None)

    def close(self) -> None:
        """Finish all calls, and close the file."""
        self._is_closed = True
        self._thread.submit(self._database.close)
        self._thread.shutdown()

    def _enter(self, size: int) -> bool:
        """Count a waiting call. Returns False if too many calls are waiting."""
        with self._lock:
            has_room = self._pending < PENDING_MAX and (
                not self._pending_bytes or self._pending_bytes + size <= PENDING_BYTES_MAX
            )
            if has_room:
                self._pending += 1
                self._pending_bytes += size
            return has_room

    def _submit(self, size: int, run: Callable[[A], T], argument: A) -> Future[T]:
        """Queue `run` for the thread. The call is counted as waiting until it has ended or was cancelled."""

        def leave(_: Future[T]) -> None:
            with self._lock:
                self._pending -= 1
                self._pending_bytes -= size

        call = self._thread.submit(run, argument)
        call.add_done_callback(leave)
        return call

    # The methods below run in the thread.

    def _run(self, action: Callable[[ResponseDatabase], T]) -> T:
        try:
            return self._healed(action)
        finally:
            # Deleted text is removed from the write-ahead log when no other call is waiting.
            if self._database.has_traces and self._pending <= 1:
                self._truncate_log()

    def _healed(self, action: Callable[[ResponseDatabase], T]) -> T:
        """Return the result of `action`. If the file is damaged, repeat the action on a new file."""
        try:
            return action(self._database)
        except (sqlite3.DatabaseError, msgspec.DecodeError, UnicodeDecodeError) as error:
            if not is_damage(error):
                raise
            self._problems["damaged"] += 1
            aside = self._path.with_suffix(".damaged")
            log.error("response store is damaged (%s): it is set aside as %s, and a new one is created", error, aside)
            self._database.set_aside(aside)
            return action(self._database)

    def _truncate_log(self) -> None:
        try:
            self._database.truncate_log()
        except (sqlite3.Error, OSError) as error:
            log.error("write-ahead log of the response store cannot be emptied: %s", error)

    def _keep_only(self, tenants: frozenset[str]) -> None:
        self._tenants = tenants
        self._shrink_or_log()

    def _keep_or_log(self, make: Callable[[], StoredResponse]) -> bool:
        try:
            stored = make()
            if self._tenants is None or stored.tenant in self._tenants:
                self._run(lambda database: database.keep(stored))
            return True
        except (sqlite3.Error, OSError) as error:
            self._problems["failed"] += 1
            log.error("response not stored: %s", error)
        except Exception:  # No task awaits this call, so its error is logged here.
            self._problems["failed"] += 1
            log.exception("response not stored")
        return False

    def _shrink_or_log(self) -> None:
        try:
            if self._path.exists():
                self._healed(lambda database: database.shrink(self._tenants))
                self._truncate_log()
        except (sqlite3.Error, OSError) as error:
            self._problems["failed"] += 1
            log.error("response store could not be shrunk: %s", error)


def done(is_stored: bool) -> Future[bool]:
    """Return the result of a `keep` that has ended."""
    result = Future[bool]()
    result.set_result(is_stored)
    return result
