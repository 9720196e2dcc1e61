"""Store of responses that clients may retrieve or continue. One thread uses an SQLite database, limited by size and
age.
"""

import asyncio
import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gateway.api.responses.response_database import ResponseDatabase, StoredResponse, is_damage
from gateway.disk import SYSTEM_DISK, Disk
from gateway.single_thread import MakeThread, single_thread
from gateway.wall_clock import WallClock

log = logging.getLogger(__name__)

A = TypeVar("A")
T = TypeVar("T")

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

    async def settle(self) -> None:
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
