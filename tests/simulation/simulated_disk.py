"""The simulated machine's disk: it is slow or full, and a power cut takes what was not synced. Its files are real."""

import errno
import os
import sqlite3
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from random import Random
from typing import Any

from gateway.disk_and_clock import Disk
from tests.simulation.simulated_database import DatabaseFaults, SimulatedDatabase
from tests.simulation.virtual_loop import VirtualLoop

# Latency of the calls of one thread.
QUICK_S = 0.002
DATABASE_SUFFIXES = ("", "-wal")


class SimulatedDisk:
    """What has happened to the files of one home. It outlives gateways."""

    def __init__(self, home: Path, random: Random, note: Callable[[str], None]) -> None:
        self.home = home
        self.random = random
        self.note = note
        self.boot = 1
        self.is_full = False
        # Without it, no statement of SQLite fails.
        self.database_faults: DatabaseFaults | None = None
        # Longest latency of a call of a thread.
        self.latency_s = QUICK_S
        # Number of lines of the audit log that a full disk or the end of a gateway has cut off.
        self.torn = 0
        # Number of bytes of each file, by inode, that survive a power cut. Files without an entry survive whole.
        self._synced: dict[int, int] = {}
        # Content of files before a rename that was not synced; None for a file that did not exist.
        self._before: dict[Path, bytes | None] = {}

    def write(self, file: int, data: bytes | memoryview) -> int:
        status = os.fstat(file)
        if not status.st_size:
            self._synced[status.st_ino] = 0
        else:
            self._synced.setdefault(status.st_ino, status.st_size)
        if self.is_full:
            # The last bytes of the disk take a part of the data.
            if len(data) > 1 and self.random.random() < 0.3:
                self.torn += 1
                return os.write(file, data[: self.random.randrange(1, len(data))])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(file, data)

    def tear(self, file: int, data: bytes | memoryview) -> None:
        """Write the part of the data that is written when the process is killed."""
        self.torn += 1
        os.write(file, data[: self.random.randrange(len(data))])

    def sync(self, file: int) -> None:
        self._synced.pop(os.fstat(file).st_ino, None)

    def replace(self, source: Path | str, target: Path | str, folder: int | None) -> None:
        if folder is None:
            # A rename in an open folder is synced with the folder.
            path = Path(target)
            self._before[path] = path.read_bytes() if path.exists() else None
        os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)

    def cut_power(self) -> None:
        """Lose what was not synced: renames, and the ends of files."""
        self.boot += 1
        self.is_full = False
        for path, content in self._before.items():
            if self.random.random() < 0.3 and path.exists():
                self.note(f"lost the rename of {path.name}")
                if content is None:
                    path.unlink()
                else:
                    path.write_bytes(content)
        self._before = {}
        if self._synced:
            for folder in ("run", "run/workers", "state", "state/background", "keys", "logs"):
                for path in sorted((self.home / folder).glob("*"), key=self.order_of):
                    self._truncate(path)
        self._synced = {}

    def order_of(self, path: Path) -> tuple[float, str]:
        """Return a key that sorts files alike in each run. Names of journals and of new files are random."""
        status = path.stat()
        if path.suffix == ".journal":
            return status.st_mtime, ""
        return (float(status.st_size) if path.name.startswith(".") else 0.0), path.name.partition("-")[0]

    def _truncate(self, path: Path) -> None:
        status = path.stat()
        kept = self._synced.get(status.st_ino)
        if kept is not None and kept < status.st_size and self.random.random() < 0.5:
            os.truncate(path, self.random.randint(kept, status.st_size))
            self.note(f"lost the end of {path.suffix if path.suffix == '.journal' else path.name}")


class DiskOfProcess(Disk):
    """The disk as one process sees it. Once the process has been killed, it changes nothing."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.is_dead = self.was_killed_writing = False
        # The process is killed in the middle of this many changes from now.
        self.changes_left: int | None = None
        self.on_kill: Callable[[], None] = lambda: None

    def boot_id(self) -> str:
        return f"boot {self.disk.boot}"

    def open(self, path: Path, flags: int) -> int:
        self._check()
        return super().open(path, flags)

    def write(self, file: int, data: bytes | memoryview) -> int:
        if self._is_killed_now():
            self.disk.tear(file, data)
        self._check()
        return self.disk.write(file, data)

    def truncate(self, file: int, size_bytes: int) -> None:
        self._check()
        super().truncate(file, size_bytes)

    def sync(self, file: int) -> None:
        self._check()
        self.disk.sync(file)

    def replace(self, source: Path | str, target: Path | str, folder: int | None = None) -> None:
        self._is_killed_now()
        self._check()
        self.disk.replace(source, target, folder)

    def unlink(self, path: Path) -> None:
        self._is_killed_now()
        self._check()
        super().unlink(path)

    def connect(self, path: Path) -> sqlite3.Connection:
        if self.disk.database_faults is None:
            return super().connect(path)
        database = sqlite3.connect(path, isolation_level=None, factory=SimulatedDatabase)
        database.faults = self.disk.database_faults
        return database

    def _is_killed_now(self) -> bool:
        if self.changes_left is None or self.is_dead:
            return False
        self.changes_left -= 1
        if self.changes_left > 0:
            return False
        self.disk.note("killed while it changes a file")
        self.was_killed_writing = True
        self.on_kill()
        return True

    def _check(self) -> None:
        if self.is_dead:
            raise OSError(errno.EIO, "this process was killed")


class SimulatedThread(Executor):
    """Thread of a gateway: its calls run in order on the virtual loop, each after a latency of the disk."""

    def __init__(self, loop: VirtualLoop, process: DiskOfProcess, name: str) -> None:
        self._loop = loop
        self._process = process
        # SQLite is not below `DiskOfProcess`, so calls of a killed gateway must not run.
        self._is_of_database = name == "store"
        self._calls: deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = deque()
        self._is_running = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        assert not kwargs
        call: Future[Any] = Future()
        self._calls.append((call, fn, args))
        if not self._is_running:
            self._is_running = True
            self._loop.call_later(self._latency_s(), self._run)
        return call

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        while self._calls:
            self._call()

    def _latency_s(self) -> float:
        disk = self._process.disk
        return disk.random.random() * (disk.latency_s if not self._process.is_dead else QUICK_S)

    def _run(self) -> None:
        if self._calls:
            self._call()
        self._is_running = bool(self._calls)
        if self._is_running:
            self._loop.call_later(self._latency_s(), self._run)

    def _call(self) -> None:
        call, fn, args = self._calls.popleft()
        if self._is_of_database and self._process.is_dead:
            call.cancel()
        if not call.set_running_or_notify_cancel():
            return
        try:
            result = fn(*args)
        except Exception as error:
            call.set_exception(error)
        else:
            call.set_result(result)


def abandon_database(path: Path, close: Callable[[], None], lost: Random | None) -> None:
    """Close an SQLite database as at the end of a killed process. With `lost`, the newest transactions are lost."""
    files = [path.with_name(path.name + suffix) for suffix in DATABASE_SUFFIXES]
    contents = [file.read_bytes() if file.exists() else None for file in files]
    close()
    for file, content in zip(files, contents, strict=True):
        if content is not None:
            file.write_bytes(content)
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
    if lost is not None and contents[1]:
        os.truncate(files[1], lost.randint(0, len(contents[1])))
