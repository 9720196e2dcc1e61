"""The disk cache's folder and its two threads: one writes behind, one reads ahead. Nobody waits for either.

The folder is shared by all workers: `<key of model, libraries and layout>/<key of edge>.safetensors`. A file is
written under another name, synced and renamed, so that a name stands for a whole file. Any file may vanish at any time:
by the cap on the whole folder, which every writer enforces, or by a person who clears it.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

from worker.cache_file import FORMAT, SUFFIX, Corrupt, Encoded, Record, Tokens, encode, file_key, load, open_file
from worker.counts import DiskCounts
from worker.kv import Span, arrays_of

log = logging.getLogger("mlxd.worker")

QUARANTINE: Final = "quarantine"
# Bytes that may wait to be written; they may keep memory that the prefix cache has let go of.
QUEUE_BYTES: Final = 1 << 30
# When the cap is reached, this share of it is kept: looking at every file pays off for many writes.
KEEP_RATIO: Final = 0.9
_TEMP: Final = ".part"
_STALE_TEMP_S: Final = 3600.0


class Status(Enum):
    PENDING = auto()
    WRITTEN = auto()
    LOST = auto()


@dataclass(slots=True, eq=False)
class Entry:
    """A file, or one to be. The engine thread makes it; after that, only the disk threads change its status."""

    key: str
    parent: "Entry | None"
    salt: str
    begin: int
    tokens: Tokens
    has_kv: bool
    has_state: bool
    status: Status = Status.PENDING
    nbytes: int = 0

    @property
    def is_live(self) -> bool:
        return self.status is not Status.LOST

    @property
    def is_readable(self) -> bool:
        return self.status is Status.WRITTEN


@dataclass(slots=True, eq=False)
class Read:
    """What becomes of a wish to read. `span` is None until then, and when the file turned out to be of no use."""

    entry: Entry
    with_state: bool
    span: Span | None = None
    state: list[Any] | None = None
    is_done: bool = False


@dataclass(slots=True)
class _Write:
    entry: Entry
    span: Span
    state: list[Any] | None
    nbytes: int


class CacheDisk:
    """One worker's view of the folder. Methods are for the engine thread; none of them touches a file but `scan`."""

    def __init__(
        self,
        root: Path,
        model_key: str,
        cap: int,
        wake: Callable[[], None] = lambda: None,
        queue_bytes: int = QUEUE_BYTES,
    ) -> None:
        self._root = root
        self._folder = root / model_key
        self._cap = cap
        self._wake = wake
        self._queue_limit = queue_bytes
        self._entries: dict[str, Entry] = {}
        self._reads: dict[Entry, Read] = {}
        self._to_write: SimpleQueue[_Write | None] = SimpleQueue()
        self._to_read: SimpleQueue[Read | None] = SimpleQueue()
        self._queued_bytes = 0
        self._mutex = threading.Lock()
        self._is_failing = False
        self.lost = 0
        self.counts = DiskCounts()
        self._threads = [
            threading.Thread(target=self._write_all, name="cache-writer", daemon=True),
            threading.Thread(target=self._read_all, name="cache-reader", daemon=True),
        ]

    def start(self) -> list[Entry]:
        """Begin; returns what is there from before, each parent ahead of its children."""
        entries = self._scan()
        for thread in self._threads:
            thread.start()
        return entries

    def close(self, timeout_s: float = 0.0) -> None:
        """Write what is queued, for as long as this at most. No thread should be in native code when Python ends."""
        self._to_write.put(None)
        self._to_read.put(None)
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    @property
    def queued_bytes(self) -> int:
        """What waits to be written."""
        return self._queued_bytes

    def entry(
        self, parent: Entry | None, salt: str, begin: int, tokens: Tokens, has_kv: bool, has_state: bool
    ) -> Entry:
        """A new entry for an edge that begins where `parent`'s tokens include the one before."""
        key = file_key(parent.key if parent else "", salt, begin, tokens, has_kv)
        return Entry(key, parent, salt, begin, tokens, has_kv, has_state)

    def write(self, entry: Entry, span: Span, state: list[Any] | None) -> None:
        """Queue a file. All arrays must be evaluated. When too much waits already, the entry is lost."""
        nbytes = sum(array.nbytes for array in arrays_of(span, state or []))
        with self._mutex:
            is_full = self._queued_bytes > 0 and self._queued_bytes + nbytes > self._queue_limit
            if not is_full:
                self._queued_bytes += nbytes
        if is_full:
            self._drop(entry)
            return
        self._to_write.put(_Write(entry, span, state, nbytes))

    def read(self, entry: Entry, *, with_state: bool) -> Read:
        """Queue a read, or join one that is queued."""
        with self._mutex:
            read = self._reads.get(entry)
            if read is None or (with_state and not read.with_state):
                read = self._reads[entry] = Read(entry, with_state)
                self._to_read.put(read)
        return read

    # -- what was there before ---------------------------------------------------------------------------------------

    def _scan(self) -> list[Entry]:
        """Headers only. What cannot be used is quarantined; what has lost its parent is deleted."""
        records: dict[str, tuple[Record, Tokens, int]] = {}
        for path in self._own_files():
            try:
                with path.open("rb") as file:
                    opened = open_file(file)
                    size = os.fstat(file.fileno()).st_size
                if opened.record.key != path.name.removesuffix(SUFFIX) or opened.record.format != FORMAT:
                    raise Corrupt("it is another file's content")
                records[opened.record.key] = opened.record, opened.tokens, size
            except Corrupt as error:
                self._quarantine(path, error)
            except OSError as error:
                log.warning("disk cache: %s cannot be read: %s", path.name, error)
        children: dict[str, list[str]] = {}
        for key, (record, _, _) in records.items():
            children.setdefault(record.parent, []).append(key)
        return self._link(records, children)

    def _link(self, records: dict[str, tuple[Record, Tokens, int]], children: dict[str, list[str]]) -> list[Entry]:
        linked: list[Entry] = []
        ready: list[tuple[Entry | None, str]] = [(None, key) for key in children.get("", [])]
        while ready:
            parent, key = ready.pop()
            entry = self._adopt(parent, *records.pop(key))
            linked.append(entry)
            ready.extend((entry, child) for child in children.get(key, []))
        for key in records:
            (self._folder / (key + SUFFIX)).unlink(missing_ok=True)
        return linked

    def _adopt(self, parent: Entry | None, record: Record, tokens: Tokens, size: int) -> Entry:
        entry = Entry(
            record.key, parent, record.salt, record.begin, tokens, record.layers > 0, record.state is not None
        )
        self._settle(entry, size)
        return entry

    def _own_files(self) -> list[Path]:
        try:
            return [path for path in self._folder.iterdir() if path.suffix == SUFFIX]
        except OSError:
            return []

    # -- writing -----------------------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (write := self._to_write.get()) is not None:
            try:
                self._write_one(write)
            except Exception as error:  # the root of the thread
                self._drop(write.entry)
                if not self._is_failing:
                    log.warning("disk cache: cannot write: %s: %s", type(error).__name__, error)
                self._is_failing = True
            with self._mutex:
                self._queued_bytes -= write.nbytes

    def _write_one(self, write: _Write) -> None:
        entry = write.entry
        if entry.parent is not None and not entry.parent.is_live:
            self._drop(entry)
            return
        parent = entry.parent.key if entry.parent else ""
        record = Record(FORMAT, entry.key, parent, entry.salt, entry.begin, len(entry.tokens), 0, 0, 0, None)
        encoded = encode(record, entry.tokens, write.span, write.state)
        path = self._folder / (entry.key + SUFFIX)
        temp = self._reserve(entry.key, encoded.size)
        if temp is None:
            self._drop(entry)
            return
        try:
            _fill(temp, encoded)
            with self._ledger():
                temp.rename(path)
        except OSError:
            temp.unlink(missing_ok=True)
            raise
        self._settle(entry, encoded.size)
        self.counts.writes += 1
        self._is_failing = False
        self._touch(entry)

    def _reserve(self, key: str, size: int) -> Path | None:
        """An empty file of the right size under another name, with the cap kept; None if it can never fit."""
        if size > self._cap * KEEP_RATIO:
            return None
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for folder in (self._root, self._folder):
            folder.chmod(0o700)
        temp = self._folder / f"{key}.{os.getpid()}{_TEMP}"
        with self._ledger() as ledger:
            total = _read_total(ledger)
            if total is None or total + size > self._cap:
                total = self._make_room(size)
            _allocate(temp, size)
            os.pwrite(ledger, f"{total + size:020d}".encode(), 0)
        return temp

    @contextmanager
    def _ledger(self) -> Generator[int]:
        """The file that tells all workers how many bytes the folder holds (at least), locked.

        Names change only under the lock, or a worker that counts could miss a file that is just being renamed.
        """
        ledger = os.open(self._root / ".total", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)

    def _make_room(self, size: int) -> int:
        """Delete the files that were used longest ago; returns the bytes that are left. Parents are newer than their
        children, so that what goes first is an end of a path."""
        files = _list_files(self._root)
        total = sum(nbytes for _, nbytes, _ in files)
        if total + size > self._cap:
            for _, nbytes, path in sorted(files):
                if total + size <= self._cap * KEEP_RATIO:
                    break
                if path.suffix != _TEMP:  # another worker is writing that one
                    path.unlink(missing_ok=True)
                    total -= nbytes
        here = {path.name.removesuffix(SUFFIX) for path in self._own_files()}
        for entry in [entry for key, entry in list(self._entries.items()) if key not in here]:
            self._lose(entry)
        return total

    def _touch(self, entry: Entry) -> None:
        """Mark a path as used now, the root as the last."""
        now, at = time.time_ns(), 0
        step: Entry | None = entry
        while step is not None:
            try:
                os.utime(self._folder / (step.key + SUFFIX), ns=(now + at, now + at))
            except OSError:
                self._lose(step)
            step, at = step.parent, at + 1000

    # -- reading -----------------------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while (read := self._to_read.get()) is not None:
            path = self._folder / (read.entry.key + SUFFIX)
            try:
                span, read.state = load(path, read.entry.key, with_state=read.with_state)
                read.span = span
                self._touch(read.entry)
            except FileNotFoundError:
                self._lose(read.entry)
            except Exception as error:  # the root of the thread: whatever is wrong with a file, it is not used
                self._lose(read.entry)
                if path.exists():  # else it was deleted while it was being read
                    self._quarantine(path, error)
            with self._mutex:
                if self._reads.get(read.entry) is read:
                    del self._reads[read.entry]
            read.is_done = True
            self._wake()

    # -- books -------------------------------------------------------------------------------------------------------

    def _settle(self, entry: Entry, size: int) -> None:
        with self._mutex:
            known = self._entries.get(entry.key)
            self._entries[entry.key] = entry
            self.counts.files += known is None
            self.counts.bytes += size - (known.nbytes if known else 0)
            entry.nbytes, entry.status = size, Status.WRITTEN

    def _lose(self, entry: Entry) -> None:
        with self._mutex:
            if self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                self.counts.files -= 1
                self.counts.bytes -= entry.nbytes
            self.lost += entry.status is not Status.LOST
            entry.status = Status.LOST

    def _drop(self, entry: Entry) -> None:
        self._lose(entry)
        with self._mutex:
            self.counts.dropped += 1

    def _quarantine(self, path: Path, error: Exception) -> None:
        self.counts.quarantined += 1
        log.warning("disk cache: %s is not used and set aside: %s", path.name, error)
        try:
            (self._root / QUARANTINE).mkdir(mode=0o700, exist_ok=True)
            with self._ledger():
                path.rename(self._root / QUARANTINE / path.name)
        except OSError:
            path.unlink(missing_ok=True)


def _allocate(temp: Path, size: int) -> None:
    """Only the owner may read it from the first moment."""
    descriptor = os.open(temp, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        os.truncate(descriptor, size)
    except OSError:
        temp.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _fill(temp: Path, encoded: Encoded) -> None:
    with temp.open("r+b") as file:
        file.writelines((encoded.header, *encoded.buffers))
        file.flush()
        os.fsync(file.fileno())


def _list_files(root: Path) -> list[tuple[int, int, Path]]:
    """(time of last use, bytes, path) of every file of every model. Remains of dead writers are deleted."""
    files: list[tuple[int, int, Path]] = []
    for path in [*root.glob(f"*/*{SUFFIX}"), *root.glob(f"*/*{_TEMP}")]:
        try:
            facts = path.stat()
            if path.suffix == _TEMP and _is_stale(path, facts.st_mtime):
                path.unlink()
                continue
        except OSError:
            continue
        files.append((facts.st_mtime_ns, facts.st_size, path))
    return files


def _is_stale(temp: Path, modified: float) -> bool:
    pid = temp.name.removesuffix(_TEMP).rpartition(".")[2]
    if time.time() - modified > _STALE_TEMP_S or not pid.isdecimal():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def _read_total(ledger: int) -> int | None:
    text = os.pread(ledger, 20, 0)
    return int(text) if text.isdigit() else None
