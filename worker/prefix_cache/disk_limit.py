"""Folder of the disk cache, shared by all workers: ownership of its parts, its size limit, and quarantine.

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
import os
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from worker.prefix_cache.file_format import SUFFIX, EncodedFile

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
