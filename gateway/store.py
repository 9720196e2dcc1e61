"""Responses that clients may come back to: SQLite in a private file, one thread of its own, capped by size and age."""

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct

log = logging.getLogger(__name__)

T = TypeVar("T")

# Of one conversation: what is longer is most likely a loop in somebody's program.
CHAIN_MAX: Final = 10_000
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, used REAL NOT NULL, size INTEGER NOT NULL,
    body BLOB NOT NULL, inputs BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used, size);
CREATE TABLE IF NOT EXISTS items (
    id TEXT NOT NULL, response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE, PRIMARY KEY (response, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_id ON items (id);
"""


class Stored(Struct, frozen=True):
    """One response: `body` is its JSON, `inputs` the JSON list of its own input items.

    `item_ids` are those of all items in it, by which they can be referred to. `tenant` is who may read it.
    """

    id: str
    tenant: str
    previous: str | None
    body: bytes
    inputs: bytes
    item_ids: Sequence[str] = ()


class StoreBroken(Exception):
    """The store cannot be read; the log says why."""


class Store:
    """Calls are carried out in the order in which they are made, so what was kept is there for whoever asks next.

    What is used again counts as new, with the whole conversation before it.
    """

    def __init__(self, path: Path, max_bytes: int, max_age_s: float, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, "store")
        self._is_closed = False
        # The thread's own.
        self._database: sqlite3.Connection | None = None

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def limit(self, max_bytes: int, max_age_s: float) -> None:
        """From now on these. What is over them goes, soon."""
        self._max_bytes, self._max_age_s = max_bytes, max_age_s
        if not self._is_closed:
            self._thread.submit(self._shrink_or_log)

    def keep(self, stored: Stored) -> None:
        """Keep a response, soon. One that cannot be kept is logged: its client has it anyway."""
        if self.is_on and not self._is_closed:
            self._thread.submit(self._keep_or_log, stored)

    async def get(self, tenant: str, response_id: str) -> Stored | None:
        """Raises `StoreBroken`, as do all of these."""
        return await self._call(lambda: self._get(self._open(), tenant, response_id))

    async def conversation(self, tenant: str, response_id: str) -> list[Stored] | None:
        """A response and all before it, the oldest first. None when any of them is gone."""
        return await self._call(lambda: self._conversation(tenant, response_id))

    async def owner(self, tenant: str, item_id: str) -> Stored | None:
        """The newest response that holds an item of this id."""
        return await self._call(lambda: self._owner(tenant, item_id))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Whether it was there."""
        return await self._call(lambda: self._delete(tenant, response_id))

    def close(self) -> None:
        """Finish what was begun, and close the file."""
        self._is_closed = True
        self._thread.submit(self._close)
        self._thread.shutdown()

    # In the thread.

    async def _call(self, action: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, action)
        except (sqlite3.Error, OSError) as error:
            log.error("the store of responses cannot be read: %s", error)
            raise StoreBroken from error

    def _open(self) -> sqlite3.Connection:
        if self._database is None:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                self._database = self._connect()
            except sqlite3.DatabaseError as error:
                if type(error) is not sqlite3.DatabaseError:  # Locked, full, not allowed: not the file's fault.
                    raise
                log.warning("the store of responses is damaged (%s) and begun anew", error)
                self._path.replace(self._path.with_suffix(".damaged"))
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
            database.executescript(_SCHEMA)
        except sqlite3.Error:
            database.close()
            raise
        return database

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _keep_or_log(self, stored: Stored) -> None:
        try:
            self._keep(self._open(), stored)
        except (sqlite3.Error, OSError) as error:
            log.error("a response could not be kept: %s", error)

    def _shrink_or_log(self) -> None:
        try:
            if self._path.exists():
                database = self._open()
                with database:
                    database.execute("BEGIN")
                    self._evict(database)
        except (sqlite3.Error, OSError) as error:
            log.error("the store of responses could not be made smaller: %s", error)

    def _keep(self, database: sqlite3.Connection, stored: Stored) -> None:
        size = len(stored.body) + len(stored.inputs)
        row = (stored.id, stored.tenant, stored.previous, self._clock(), size, stored.body, stored.inputs)
        with database:
            database.execute("BEGIN")
            database.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            items = [(item_id, stored.id) for item_id in stored.item_ids]
            database.executemany("INSERT OR IGNORE INTO items VALUES (?, ?)", items)
            self._evict(database)

    def _evict(self, database: sqlite3.Connection) -> None:
        """The oldest go, until what is left is young and small enough."""
        database.execute("DELETE FROM responses WHERE used < ?", (self._clock() - self._max_age_s,))
        (total,) = database.execute("SELECT COALESCE(SUM(size), 0) FROM responses").fetchone()
        while total > self._max_bytes:
            oldest = database.execute("SELECT id, size FROM responses ORDER BY used LIMIT 16").fetchall()
            for response_id, size in oldest:
                database.execute("DELETE FROM responses WHERE id = ?", (response_id,))
                total -= size
                if total <= self._max_bytes:
                    break

    def _get(self, database: sqlite3.Connection, tenant: str, response_id: str) -> Stored | None:
        row = database.execute(
            "SELECT id, tenant, previous, body, inputs FROM responses WHERE id = ? AND tenant = ? AND used >= ?",
            (response_id, tenant, self._clock() - self._max_age_s),
        ).fetchone()
        return None if row is None else Stored(*row)

    def _conversation(self, tenant: str, response_id: str) -> list[Stored] | None:
        database = self._open()
        found: list[Stored] = []
        wanted: str | None = response_id
        while wanted is not None and len(found) < CHAIN_MAX:
            stored = self._get(database, tenant, wanted)
            if stored is None:
                return None
            found.append(stored)
            wanted = stored.previous
        with database:
            database.execute("BEGIN")
            used = self._clock()
            database.executemany("UPDATE responses SET used = ? WHERE id = ?", [(used, one.id) for one in found])
        return found[::-1]

    def _owner(self, tenant: str, item_id: str) -> Stored | None:
        row = (
            self._open()
            .execute(
                "SELECT response FROM items JOIN responses ON responses.id = items.response"
                " WHERE items.id = ? AND tenant = ? ORDER BY used DESC LIMIT 1",
                (item_id, tenant),
            )
            .fetchone()
        )
        return None if row is None else self._get(self._open(), tenant, row[0])

    def _delete(self, tenant: str, response_id: str) -> bool:
        sql = "DELETE FROM responses WHERE id = ? AND tenant = ?"
        return self._open().execute(sql, (response_id, tenant)).rowcount > 0
