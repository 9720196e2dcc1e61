"""SQLite database on the simulated disk: its statements fail while the disk is full, and by a rate of the seed."""

import sqlite3
from collections.abc import Callable, Iterable
from random import Random
from types import TracebackType
from typing import Any, Literal

WRITES = ("BEGIN", "INSERT", "UPDATE", "DELETE", "CREATE", "PRAGMA WAL")


class DatabaseFaults:
    """Faults of all databases of one machine."""

    def __init__(self, random: Random, rate: float, is_full: Callable[[], bool], note: Callable[[str], None]) -> None:
        self.random = random
        self.rate = rate
        self.is_full = is_full
        self.note = note

    def draw(self, *, is_write: bool) -> sqlite3.OperationalError | None:
        """Return the error of this statement, if it fails."""
        if is_write and self.is_full():
            return self._error(sqlite3.SQLITE_FULL, "database or disk is full")
        if self.rate and self.random.random() < self.rate:
            return self._error(
                *self.random.choice(
                    (
                        (sqlite3.SQLITE_BUSY, "database is locked"),
                        (sqlite3.SQLITE_IOERR, "disk I/O error"),
                        (sqlite3.SQLITE_CANTOPEN, "unable to open database file"),
                    )
                )
            )
        return None

    def _error(self, code: int, text: str) -> sqlite3.OperationalError:
        self.note(f"database: {text}")
        error = sqlite3.OperationalError(text)
        error.sqlite_errorcode = code
        return error


class SimulatedDatabase(sqlite3.Connection):
    """Connection whose statements and commits may fail. `faults` is set once it is open."""

    faults: DatabaseFaults | None = None

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        self._check(sql)
        return super().execute(sql, parameters)

    def executemany(self, sql: str, parameters: Iterable[Any], /) -> sqlite3.Cursor:
        self._check(sql)
        return super().executemany(sql, parameters)

    def executescript(self, sql_script: str, /) -> sqlite3.Cursor:
        self._check(sql_script)
        return super().executescript(sql_script)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> Literal[False]:
        failure = None if error is not None or self.faults is None else self.faults.draw(is_write=True)
        if failure is None:
            return super().__exit__(kind, error, trace)
        # SQLite rolls back what it cannot commit.
        super().__exit__(sqlite3.OperationalError, failure, None)
        raise failure

    def _check(self, sql: str) -> None:
        if self.faults is not None:
            failure = self.faults.draw(is_write=sql.lstrip().upper().startswith(WRITES))
            if failure is not None:
                raise failure
