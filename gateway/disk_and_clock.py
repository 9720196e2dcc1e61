"""Disk, wall clock and threads of the daemon, each of which a simulation replaces.

Threads that do blocking calls one after the other. A simulation has its own, which use a virtual clock.

Wall clock for the ages of stored files. After a jump forward of the system's clock, it follows only after a
while.

Changes of files that the next daemon reads. A simulation has a disk of its own, which fills up and loses data that
were not synced.
"""

import os
import sqlite3
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final

# Makes an executor, with a name, that runs its calls in order.
MakeThread = Callable[[str], Executor]


def single_thread(name: str) -> Executor:
    return ThreadPoolExecutor(1, name)


# A difference of more than this between the wall clock and the monotonic clock is a jump.
JUMP_S: Final = 3600.0
# The clock follows a jump after this time on the monotonic clock.
TRUST_S: Final = 3600.0


class WallClock:
    """Returns seconds since the epoch. It is not thread-safe, so each owner needs its own instance.

    If the system's clock is wrongly set to next year, for example at boot, stored files must not all expire
    immediately.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._newest = wall()
        self._at = monotonic()
        self._jumped_at: float | None = None

    def resume(self, newest: float) -> None:
        """Continue from `newest`, the newest time that an earlier process has recorded."""
        self._newest = min(self._newest, newest)

    def __call__(self) -> float:
        wall, at = self._wall(), self._monotonic()
        expected = self._newest + at - self._at
        if wall - expected > JUMP_S:
            if self._jumped_at is None:
                self._jumped_at = at
            if at - self._jumped_at < TRUST_S:
                return expected
        self._newest, self._at, self._jumped_at = wall, at, None
        return wall


_BOOT_ID_FILE: Final = Path("/proc/sys/kernel/random/boot_id")
_BOOT_ID_COMMAND: Final = ("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid")
_BOOT_ID_TIMEOUT_S: Final = 5.0


@cache
def boot_id() -> str:
    """Return the id of the machine's current boot; empty if the system has none."""
    try:
        if _BOOT_ID_FILE.exists():
            return _BOOT_ID_FILE.read_text().strip()
        return subprocess.run(
            _BOOT_ID_COMMAND, capture_output=True, text=True, timeout=_BOOT_ID_TIMEOUT_S, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class Disk:
    """The system's calls that change such files. All but `boot_id` raise `OSError`."""

    def boot_id(self) -> str:
        """Return the id of the machine's current boot; empty if the system has none. An earlier boot may have lost data
        that were not synced.
        """
        return boot_id()

    def open(self, path: Path, flags: int) -> int:
        """Open a file that only its owner may read, and return its descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def write(self, file: int, data: bytes | memoryview) -> int:
        """Write some of the bytes, and return how many."""
        return os.write(file, data)

    def write_all(self, file: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self.write(file, rest) :]

    def truncate(self, file: int, size_bytes: int) -> None:
        os.ftruncate(file, size_bytes)

    def sync(self, file: int) -> None:
        """Return once a file, or the names in a folder, will survive a power cut."""
        os.fsync(file)

    def replace(self, source: Path | str, target: Path | str, folder: int | None = None) -> None:
        """Rename a file atomically. Names are relative to the open folder, if one is given."""
        os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def connect(self, path: Path) -> sqlite3.Connection:
        """Open an SQLite database, whose transactions its user begins. Its methods raise `sqlite3.Error`."""
        return sqlite3.connect(path, isolation_level=None)


SYSTEM_DISK: Final = Disk()
