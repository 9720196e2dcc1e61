"""Changes of files that the next daemon reads. A simulation has a disk of its own, which fills up and loses data that
were not synced.
"""

import os
import sqlite3
import subprocess
from functools import cache
from pathlib import Path
from typing import Final

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
