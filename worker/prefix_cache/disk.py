"""Disk cache: its index, and two threads that write behind and read ahead. No step waits for the disk.

Folder of the disk cache, shared by all workers: ownership of its parts, its size limit, and quarantine.

    .total                                      bytes of all files, and the lock for names
    <key of form>/.model                        the model's path, for people and for `mlxctl cache clear`
    <key of form>/.for.<owner>.<form>           whose files these are; locked while a worker uses them
    <key of form>/<key of edge>.safetensors
    quarantine/<key of form>.<key of edge>.safetensors

Files are written under another name, synced and renamed, so that a file under its own name is always complete. Any file
may be deleted at any time: by a writer that enforces the limit, or by a person who clears the folder.
"""

import fcntl
import hashlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final

import msgspec

from protocol.stats import Stats
from worker.kv.spans_and_checkpoints import Span, arrays_of
from worker.prefix_cache.file_format import (
    FORMAT,
    SUFFIX,
    Corrupt,
    EncodedFile,
    FileHeader,
    Tokens,
    encode,
    file_key,
    load,
    open_file,
)

log = logging.getLogger("mlxd.worker")

LABEL: Final = ".model"
QUARANTINE: Final = "quarantine"
# When files are deleted, this fraction of the limit is kept. The deletion, which lists all files, then makes room for
# many writes.
KEEP_RATIO: Final = 0.9
_MARK: Final = ".for."
_PART_DIGITS: Final = 8
_TEMP: Final = ".part"
_STALE_TEMP_S: Final = 3600.0


class CacheFormat(msgspec.Struct, frozen=True):
    """Form of cached KV: digests of everything that the KV depends on. Files of another form cannot be used."""

    libraries: str
    layout: str
    weights: str
    configuration: str
    tokenizer: str

    @property
    def key(self) -> str:
        return hashlib.blake2b(msgspec.json.encode(self), digest_size=20).hexdigest()


class FolderOwner(msgspec.Struct, frozen=True):
    """Owner of a folder's files: a model that a daemon serves, whatever the form of its KV.

    Models of a daemon differ in `name`; daemons that share a folder through links differ in `root`. Models with the
    same form of KV share a folder. It is stale once none of them has this form any more and no worker holds the lock of
    a mark.
    """

    name: str
    root: str
    # Path of the model. It is only shown to people.
    path: str
    form: CacheFormat

    @property
    def owner(self) -> str:
        """Prefix of the names of this owner's marks. It is the same for every form of KV."""
        return _MARK + hashlib.blake2b(msgspec.json.encode((self.name, self.root)), digest_size=8).hexdigest() + "."

    @property
    def mark(self) -> str:
        """Name of the file that marks the files of a folder as this owner's: the owner's prefix, and the beginning of
        each digest of the form. The file is empty, so that a crash cannot leave it half written.
        """
        return self.owner + ".".join(part[:_PART_DIGITS] for part in msgspec.structs.astuple(self.form))

    def differences(self, mark: str) -> str:
        """Return the names of the fingerprint's parts that differ from `mark`."""
        parts, own = (name.removeprefix(self.owner).split(".") for name in (mark, self.mark))
        names = CacheFormat.__struct_fields__ if len(parts) == len(own) else ()
        differing = [name for name, part, now in zip(names, parts, own, strict=False) if part != now]
        return ", ".join(differing) or "form"


@dataclass(frozen=True, slots=True)
class Stale:
    """Stale folder whose files were quarantined."""

    model: str
    key: str
    files: int
    nbytes: int
    differences: str


@dataclass(frozen=True, slots=True)
class DiskQuota:
    """Reservation of space for a file with a temporary name. `is_counted` is set if making room required a list of all
    files."""

    temp: Path
    is_counted: bool


class ModelFolder:
    """Part of the folder that one worker uses. Used by the disk threads, and by the scan before they start."""

    def __init__(self, root: Path, key: str, cap: int, claim: FolderOwner | None) -> None:
        self._root = root
        self._here = root / key
        self._cap = cap
        self._claim = claim
        # Descriptor of this worker's mark, which is locked. Used by the writing thread.
        self._lease: int | None = None

    def path(self, key: str) -> Path:
        return self._here / (key + SUFFIX)

    def files(self) -> list[Path]:
        return [self._here / name for name in _names(self._here) if name.endswith(SUFFIX)]

    # -- ownership ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Mark the files as owned and in use. Raises `OSError`."""
        if self._claim is not None:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._ledger():
                self._open_here()

    def release(self) -> None:
        """Mark the files as not in use."""
        if self._lease is not None:
            os.close(self._lease)
            self._lease = None

    def retire(self) -> Iterator[Stale]:
        """Quarantine the files that this owner has left in outdated forms. Raises `OSError`."""
        claim = self._claim
        if claim is None:
            return
        for folder in _folders(self._root):
            if folder == self._here or not any(name.startswith(claim.owner) for name in _names(folder)):
                continue
            with self._ledger():
                stale = self._retire(folder, claim)
            if stale is not None and stale.files:
                yield stale

    def _retire(self, folder: Path, claim: FolderOwner) -> Stale | None:
        """Quarantine a folder's files, under the lock. The mark stays, because an ending worker may still write."""
        names = _names(folder)
        marks = [name for name in names if name.startswith(_MARK)]
        own = [mark for mark in marks if mark.startswith(claim.owner)]
        if not own or any(_is_leased(folder / mark) for mark in own):
            return None
        if len(own) < len(marks):  # another model still has this form of KV
            for mark in own:
                (folder / mark).unlink(missing_ok=True)
            return None
        sizes = [self._move(folder / name) for name in names if name.endswith(SUFFIX)]
        moved = [size for size in sizes if size is not None]
        return Stale(claim.name, folder.name, len(moved), sum(moved), claim.differences(own[0]))

    def _open_here(self) -> None:
        """Create this worker's folder with its mark, under the lock, even if the folder was deleted."""
        self._here.mkdir(mode=0o700, exist_ok=True)
        for folder in (self._root, self._here):
            folder.chmod(0o700)
        if self._claim is None or (self._lease is not None and os.fstat(self._lease).st_nlink):
            return
        self.release()
        label = self._here / LABEL
        label.touch(mode=0o600)
        label.write_text(f"{self._claim.path}\n", encoding="utf-8")
        self._lease = os.open(self._here / self._claim.mark, os.O_CREAT | os.O_RDWR, 0o600)
        # this cannot block, because a mark is only locked by a process that holds the ledger's lock
        fcntl.flock(self._lease, fcntl.LOCK_SH | fcntl.LOCK_NB)

    # -- the limit ---------------------------------------------------------------------------------------------------

    def reserve(self, key: str, size: int) -> DiskQuota | None:
        """Reserve space for a file within the limit; None if the file can never fit. Raises `OSError`."""
        if size > self._cap * KEEP_RATIO:
            return None
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        temp = self._here / f"{key}.{os.getpid()}{_TEMP}"
        with self._ledger() as ledger:
            self._open_here()
            total = _read_total(ledger)
            is_counted = total + size > self._cap
            if is_counted:
                total = self._make_room(size)
            _allocate(temp, size)
            os.pwrite(ledger, f"{total + size:020d}".encode(), 0)
        return DiskQuota(temp, is_counted)

    def publish(self, temp: Path, encoded: EncodedFile, key: str) -> None:
        """Write a reserved file and rename it. If that fails, delete the file and raise `OSError`."""
        try:
            with temp.open("r+b") as file:
                file.writelines((encoded.header, *encoded.buffers))
                file.flush()
                os.fsync(file.fileno())
            with self._ledger():
                temp.rename(self.path(key))
        except OSError:
            temp.unlink(missing_ok=True)
            raise

    @contextmanager
    def _ledger(self) -> Generator[int]:
        """Lock and yield the file that records the total size of the folder. The recorded size is an upper bound.

        Names change only under the lock, so that a worker that lists all files cannot miss one during a rename.
        """
        ledger = os.open(self._root / ".total", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(ledger, fcntl.LOCK_EX)
            yield ledger
        finally:
            os.close(ledger)

    def _make_room(self, size: int) -> int:
        """Delete quarantined files, then the least recently used ones. Returns the total bytes of the remaining files.

        Parents are newer than their children, so that ends of paths are deleted first.
        """
        files = _list_files(self._root)
        total = sum(file.nbytes for file in files)
        if total + size > self._cap:
            for file in sorted(files, key=lambda file: (file.path.parent.name != QUARANTINE, file.used)):
                if total + size <= self._cap * KEEP_RATIO:
                    break
                if file.path.suffix != _TEMP:  # a file with this suffix is being written by another worker
                    file.path.unlink(missing_ok=True)
                    total -= file.nbytes
        return total

    # -- quarantine --------------------------------------------------------------------------------------------------

    def set_aside(self, path: Path) -> None:
        """Quarantine a file, for people to look at until its space is needed."""
        with suppress(OSError), self._ledger():
            self._move(path)

    def _move(self, path: Path) -> int | None:
        """Move a file to the quarantine, under the lock. Returns its bytes; None if it is gone or cannot be moved."""
        try:
            nbytes = path.stat().st_size
        except OSError:
            return None
        try:
            (self._root / QUARANTINE).mkdir(mode=0o700, exist_ok=True)
            path.rename(self._root / QUARANTINE / f"{path.parent.name}.{path.name}")
        except OSError:
            try:
                path.unlink()
            except OSError:
                return None
        return nbytes


@dataclass(frozen=True, slots=True)
class _CacheFile:
    used: int
    nbytes: int
    path: Path


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; an empty list if the folder does not exist."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _folders(root: Path) -> list[Path]:
    return [path for name in _names(root) if (path := root / name).is_dir() and not path.is_symlink()]


def _is_leased(mark: Path) -> bool:
    """Whether a running worker holds the lock of a mark."""
    try:
        descriptor = os.open(mark, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _allocate(temp: Path, size: int) -> None:
    """Create a file of this size that only the user may read."""
    descriptor = os.open(temp, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    try:
        os.truncate(descriptor, size)
    except OSError:
        temp.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _list_files(root: Path) -> list[_CacheFile]:
    """List all files of all models and the quarantine. Also deletes temporary files of writers that have ended."""
    files: list[_CacheFile] = []
    for path in [*root.glob(f"*/*{SUFFIX}"), *root.glob(f"*/*{_TEMP}")]:
        try:
            facts = path.stat()
            if path.suffix == _TEMP and _is_stale(path, facts.st_mtime):
                path.unlink()
                continue
        except OSError:
            continue
        files.append(_CacheFile(facts.st_mtime_ns, facts.st_size, path))
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


def _read_total(ledger: int) -> int:
    """Return the total size. If the file has no number, the result exceeds any limit, so that the files are listed."""
    text = os.pread(ledger, 20, 0)
    return int(text) if text.isdigit() else sys.maxsize


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
            self._record_written(entry, size)
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
        self._record_written(entry, encoded.size)
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

    def _record_written(self, entry: DiskEntry, size: int) -> None:
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
