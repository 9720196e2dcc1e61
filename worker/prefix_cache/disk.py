"""Disk cache: its index, and two threads that write behind and read ahead. No step waits for the disk."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from protocol.stats import Stats
from worker.kv.kv import Span, arrays_of
from worker.prefix_cache.disk_limit import FolderOwner, ModelFolder
from worker.prefix_cache.file_format import (
    FORMAT,
    SUFFIX,
    Corrupt,
    FileHeader,
    Tokens,
    encode,
    file_key,
    load,
    open_file,
)

log = logging.getLogger("mlxd.worker")

# Maximum bytes of queued writes. A queued write holds its KV even after the prefix cache has evicted it.
MAX_QUEUED_BYTES: Final = 1 << 30


class FileStatus(Enum):
    PENDING = auto()
    WRITTEN = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class DiskEntry:
    """File of the cache, which may not be written yet. The engine thread makes the entry; then only the disk threads
    change its status."""

    key: str
    parent: "DiskEntry | None"
    salt: str
    begin: int
    tokens: Tokens
    has_state: bool
    status: FileStatus = FileStatus.PENDING
    nbytes: int = 0

    @property
    def is_live(self) -> bool:
        return self.status is not FileStatus.LOST

    @property
    def is_readable(self) -> bool:
        return self.status is FileStatus.WRITTEN


@dataclass(slots=True, eq=False)
class DiskRead:
    """Pending read. `span` is None until the read completes, and if the file is unusable."""

    entry: DiskEntry
    with_state: bool
    span: Span | None = None
    state: list[Any] | None = None
    is_done: bool = False


@dataclass(slots=True)
class _Write:
    entry: DiskEntry
    span: Span
    state: list[Any] | None
    nbytes: int


class CacheDisk:
    """Disk cache of one worker. Its methods are for the engine thread, and only `start` touches files."""

    def __init__(
        self,
        root: Path,
        model_key: str,
        cap: int,
        wake: Callable[[], None] = lambda: None,
        queue_bytes: int = MAX_QUEUED_BYTES,
        claim: FolderOwner | None = None,
    ) -> None:
        self._folder = ModelFolder(root, model_key, cap, claim)
        self._wake = wake
        self._queue_limit = queue_bytes
        self._entries: dict[str, DiskEntry] = {}
        self._reads: dict[DiskEntry, DiskRead] = {}
        self._to_write: SimpleQueue[_Write | None] = SimpleQueue()
        self._to_read: SimpleQueue[DiskRead | None] = SimpleQueue()
        # Bytes of KV and checkpoints in queued writes.
        self.queued_bytes = 0
        self._mutex = threading.Lock()
        self._is_failing = False
        self._is_reading = True
        self.lost = 0
        self.counts = Stats()
        self._threads = [
            threading.Thread(target=self._write_all, name="cache-writer", daemon=True),
            threading.Thread(target=self._read_all, name="cache-reader", daemon=True),
        ]

    def start(self) -> list[DiskEntry]:
        """Start the threads. Return the entries of an earlier run, parents before their children."""
        entries = self._scan()
        for thread in self._threads:
            thread.start()
        return entries

    def close(self, timeout_s: float = 0.0) -> None:
        """Write queued files for at most `timeout_s`, then end the threads, because none should be in native code when
        Python exits."""
        self._to_write.put(None)
        self._to_read.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def entry(
        self, parent: DiskEntry | None, salt: str, begin: int, tokens: Tokens, has_kv: bool, has_state: bool
    ) -> DiskEntry:
        """Return a new entry for an edge; the token before `begin` is in `parent`."""
        key = file_key(parent.key if parent else "", salt, begin, tokens, has_kv)
        return DiskEntry(key, parent, salt, begin, tokens, has_state)

    def write(self, entry: DiskEntry, span: Span, state: list[Any] | None) -> None:
        """Queue a file. All arrays must be evaluated. If too many bytes are queued, the entry is dropped instead."""
        nbytes = sum(array.nbytes for array in arrays_of(span, state or []))
        with self._mutex:
            is_full = self.queued_bytes > 0 and self.queued_bytes + nbytes > self._queue_limit
            if not is_full:
                self.queued_bytes += nbytes
        if is_full:
            self.drop(entry)
            return
        self._to_write.put(_Write(entry, span, state, nbytes))

    def read(self, entry: DiskEntry, *, with_state: bool) -> DiskRead:
        """Queue a read of the entry, or return its queued read. If the reading thread has ended, the read is done
        without data."""
        with self._mutex:
            if not self._is_reading:
                return DiskRead(entry, with_state, is_done=True)
            read = self._reads.get(entry)
            if read is None or (with_state and not read.with_state):
                read = self._reads[entry] = DiskRead(entry, with_state)
                self._to_read.put(read)
        return read

    # -- entries of an earlier run -----------------------------------------------------------------------------------

    def _scan(self) -> list[DiskEntry]:
        """Read all headers. Unusable files are quarantined, and files without their parent are deleted."""
        records: dict[str, tuple[FileHeader, Tokens, int]] = {}
        for path in self._folder.files():
            try:
                with path.open("rb") as file:
                    opened = open_file(file)
                    size = os.fstat(file.fileno()).st_size
                if opened.record.key != path.name.removesuffix(SUFFIX) or opened.record.format != FORMAT:
                    raise Corrupt("it is another file's content")
                records[opened.record.key] = opened.record, opened.tokens, size
            except Corrupt as error:
                self._quarantine(path, error)
            except FileNotFoundError:
                continue  # another worker has deleted the file
            except OSError as error:
                log.warning("disk cache: %s cannot be read: %s", path.name, error)
        children: dict[str, list[str]] = {}
        for key, (record, _, _) in records.items():
            children.setdefault(record.parent, []).append(key)
        return self._link(records, children)

    def _link(
        self, records: dict[str, tuple[FileHeader, Tokens, int]], children: dict[str, list[str]]
    ) -> list[DiskEntry]:
        linked: list[DiskEntry] = []
        ready: list[tuple[DiskEntry | None, str]] = [(None, key) for key in children.get("", [])]
        while ready:
            parent, key = ready.pop()
            record, tokens, size = records.pop(key)
            entry = DiskEntry(key, parent, record.salt, record.begin, tokens, record.state is not None)
            self._settle(entry, size)
            linked.append(entry)
            ready.extend((entry, child) for child in children.get(key, []))
        for key in records:
            self._folder.path(key).unlink(missing_ok=True)
        return linked

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        try:
            self._folder.claim()
            self._retire()
        except Exception as error:  # files can be written even after an error here
            self._complain(error)
        while (write := self._to_write.get()) is not None:
            try:
                self._write_one(write)
            except Exception as error:  # one failed write must not end the thread
                self.drop(write.entry)
                self._complain(error)
            with self._mutex:
                self.queued_bytes -= write.nbytes
        self._folder.release()

    def _retire(self) -> None:
        """Quarantine files that this model left in an outdated form of KV, which no worker can use."""
        for stale in self._folder.retire():
            with self._mutex:
                self.counts.disk_quarantined += stale.files
            log.warning(
                "disk cache: %d stale file(s) of %s (%d bytes, %.12s) are not used and set aside: other %s than now",
                stale.files, stale.model, stale.nbytes, stale.key, stale.differences,
            )  # fmt: skip

    def _complain(self, error: Exception) -> None:
        """Log a write error, but only the first one until a write succeeds."""
        if not self._is_failing:
            log.warning("disk cache: cannot write: %s: %s", type(error).__name__, error)
        self._is_failing = True

    def _write_one(self, write: _Write) -> None:
        entry = write.entry
        if entry.parent is not None and not entry.parent.is_live:
            self.drop(entry)
            return
        parent = entry.parent.key if entry.parent else ""
        record = FileHeader(FORMAT, entry.key, parent, entry.salt, entry.begin, len(entry.tokens), 0, 0, 0, None)
        encoded = encode(record, entry.tokens, write.span, write.state)
        room = self._folder.reserve(entry.key, encoded.size)
        if room is None:
            self.drop(entry)
            return
        if room.is_counted:
            self._forget()
        self._folder.publish(room.temp, encoded, entry.key)
        self._settle(entry, encoded.size)
        self.counts.disk_writes += 1
        self._is_failing = False
        self._touch(entry)

    def _forget(self) -> None:
        """Drop the entries whose files are gone."""
        here = {path.name.removesuffix(SUFFIX) for path in self._folder.files()}
        for entry in [entry for key, entry in list(self._entries.items()) if key not in here]:
            self._lose(entry)

    def _touch(self, entry: DiskEntry) -> None:
        """Mark all files of a path as used now, with the root as the newest."""
        now, at = time.time_ns(), 0
        step: DiskEntry | None = entry
        while step is not None:
            try:
                os.utime(self._folder.path(step.key), ns=(now + at, now + at))
            except OSError:
                self._lose(step)
            step, at = step.parent, at + 1000

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        try:
            while (read := self._to_read.get()) is not None:
                self._read_one(read)
        finally:
            with self._mutex:
                self._is_reading = False
                reads = list(self._reads.values())
            for read in reads:
                self._end(read)

    def _read_one(self, read: DiskRead) -> None:
        """Read one file. After an error the file is not used again, and rows stop waiting for it."""
        path = self._folder.path(read.entry.key)
        try:
            span, read.state = load(path, read.entry.key, with_state=read.with_state)
            read.span = span
            self._touch(read.entry)
        except FileNotFoundError:
            self._lose(read.entry)
        except Exception as error:  # one failed read must not end the thread
            self._lose(read.entry)
            self._quarantine(path, error)
        finally:
            self._end(read)

    def _end(self, read: DiskRead) -> None:
        with self._mutex:
            if self._reads.get(read.entry) is read:
                del self._reads[read.entry]
        read.is_done = True
        self._wake()

    # -- accounts ----------------------------------------------------------------------------------------------------

    def _settle(self, entry: DiskEntry, size: int) -> None:
        with self._mutex:
            known = self._entries.get(entry.key)
            self._entries[entry.key] = entry
            self.counts.disk_files += known is None
            self.counts.disk_bytes += size - (known.nbytes if known else 0)
            entry.nbytes, entry.status = size, FileStatus.WRITTEN

    def _lose(self, entry: DiskEntry) -> None:
        with self._mutex:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self.counts.disk_files -= 1
                self.counts.disk_bytes -= entry.nbytes
            self.lost += entry.status is not FileStatus.LOST
            entry.status = FileStatus.LOST

    def drop(self, entry: DiskEntry) -> None:
        """Drop an entry that is not written yet, and count it."""
        self._lose(entry)
        with self._mutex:
            self.counts.disk_dropped += 1

    def _quarantine(self, path: Path, error: Exception) -> None:
        # the file was deleted during the read; unlike `Path.exists`, this call never raises
        if not os.path.lexists(path):
            return
        with self._mutex:
            self.counts.disk_quarantined += 1
        log.warning("disk cache: %s is set aside: %s", path.name, error)
        self._folder.set_aside(path)
