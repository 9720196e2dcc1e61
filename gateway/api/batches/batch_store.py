"""Store of files and batches: their records in memory, and one thread that uses the folder.

Folder with files and batches: their records as JSON, the files' contents, and the results as they are written.

`ID.json` is the record of a file or a batch, written atomically. `FILE.data` is a file's content. A batch has `ID.in`,
a hard link to its input file's content, and the results `ID.out` and `ID.err`, to which whole lines are appended. When
the batch has ended, its results become the contents of files, or stay if it is Anthropic's.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from gateway.api.batches.batch_lines import (
    FILE_PREFIX,
    PREFIXES,
    RECORD_AGE_S,
    BatchTokens,
    Outcome,
    StoredBatch,
    StoredFile,
    new_name,
    read_result,
)
from gateway.config.settings import BatchesConfig
from gateway.disk_and_clock import SYSTEM_DISK, Disk, MakeThread, single_thread
from gateway.errors import ApiError, BadRequest, Unavailable
from gateway.state_dir import write_private

log = logging.getLogger(__name__)

RECORD: Final = ".json"
DATA: Final = ".data"
INPUT: Final = ".in"
OUTPUT: Final = ".out"
ERRORS: Final = ".err"
_UPLOAD: Final = "upload-"
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_APPEND: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND
# A result is at most about as large as the frames of its worker.
_LINE_BYTES_MAX: Final = 1 << 30


@dataclass(slots=True)
class WrittenResults:
    """Results that a batch has by now: the outcome of each line, and the tokens of all answers."""

    outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])
    tokens: BatchTokens = field(default_factory=BatchTokens)


@dataclass(slots=True)
class FolderContent:
    """Records of a folder, the oldest first, with the names of those that cannot be read."""

    files: list[StoredFile] = field(default_factory=list[StoredFile])
    batches: list[StoredBatch] = field(default_factory=list[StoredBatch])
    unreadable: list[str] = field(default_factory=list[str])


_file = msgspec.json.Decoder(StoredFile)
_batch = msgspec.json.Decoder(StoredBatch)


class BatchFolder:
    """Used by one thread. Methods raise `OSError`."""

    def __init__(self, path: Path, disk: Disk = SYSTEM_DISK) -> None:
        self._path = path
        self._disk = disk

    @property
    def exists(self) -> bool:
        return self._path.exists()

    def part(self, name: str, suffix: str) -> Path:
        return self._path / f"{name}{suffix}"

    def load(self) -> FolderContent:
        """Read all records, and delete what a killed daemon left without one."""
        content = FolderContent()
        for path in self._path.glob(f"*{RECORD}"):
            try:
                if path.name.startswith(FILE_PREFIX):
                    content.files.append(_file.decode(path.read_bytes()))
                else:
                    content.batches.append(_batch.decode(path.read_bytes()))
            except (msgspec.DecodeError, UnicodeDecodeError):
                content.unreadable.append(path.name)
        content.files.sort(key=lambda file: file.created)
        content.batches.sort(key=lambda batch: batch.created)
        # Files that a batch is about to get are named in its record before they have records of their own.
        known = {file.id for file in content.files} | {batch.id for batch in content.batches}
        known |= {name for batch in content.batches for name in (batch.output_file, batch.error_file)}
        known |= {name.removesuffix(RECORD) for name in content.unreadable}
        for path in self._path.iterdir():
            if path.name.startswith((*PREFIXES, _UPLOAD, ".")) and path.stem not in known:
                self._disk.unlink(path)
        return content

    def size_of(self, name: str) -> int:
        """Return the bytes of a file or a batch, without its record."""
        paths = (self.part(name, suffix) for suffix in (DATA, INPUT, OUTPUT, ERRORS))
        return sum(path.stat().st_size for path in paths if path.exists())

    def write(self, record: StoredFile | StoredBatch) -> None:
        """Write a record atomically."""
        self._make()
        write_private(self.part(record.id, RECORD), msgspec.json.encode(record), self._disk)

    def delete(self, name: str) -> None:
        """Delete a file or a batch. The record is deleted first, so that the rest is never found without it."""
        for suffix in (RECORD, DATA, INPUT, OUTPUT, ERRORS):
            self._disk.unlink(self.part(name, suffix))

    # -- contents ----------------------------------------------------------------------------------------------------

    def open_upload(self) -> tuple[Path, int]:
        """Create a file without a record. Returns its path and its descriptor."""
        self._make()
        path = self._path / new_name(_UPLOAD)
        return path, self._disk.open(path, _NEW)

    def append(self, file: int, data: bytes) -> None:
        self._disk.write_all(file, data)

    def close_upload(self, file: int) -> None:
        """Close a file whose content must survive a power cut."""
        try:
            self._disk.sync(file)
        finally:
            os.close(file)

    def keep_upload(self, path: Path, record: StoredFile | StoredBatch) -> None:
        """Make an upload the content of a new file, or the input of a new batch."""
        self._disk.replace(path, self.part(record.id, DATA if isinstance(record, StoredFile) else INPUT))
        self.write(record)

    def discard_upload(self, path: Path) -> None:
        self._disk.unlink(path)

    def link_input(self, batch: StoredBatch) -> None:
        """Give a new batch its input file, which may then be deleted, and write its record."""
        self.part(batch.id, INPUT).hardlink_to(self.part(batch.input_file, DATA))
        self.write(batch)

    def drop_input(self, batch_id: str) -> int:
        """Delete the input of a batch, and return its size."""
        path = self.part(batch_id, INPUT)
        size = path.stat().st_size if path.exists() else 0
        self._disk.unlink(path)
        return size

    def read(self, path: Path, offset: int, size: int) -> bytes:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)

    # -- results -----------------------------------------------------------------------------------------------------

    def write_result(self, batch_id: str, suffix: str, line: bytes) -> None:
        """Append one line. If it cannot be written, nothing of it stays."""
        file = self._disk.open(self.part(batch_id, suffix), _APPEND)
        try:
            size = os.fstat(file).st_size
            try:
                self._disk.write_all(file, line)
            except OSError:
                self._disk.truncate(file, size)
                raise
        finally:
            os.close(file)

    def results(self, batch_id: str) -> WrittenResults:
        """Read the results that were written. An incomplete last line, of a killed daemon, is removed."""
        written = WrittenResults()
        for suffix in (OUTPUT, ERRORS):
            path = self.part(batch_id, suffix)
            if not path.exists():
                continue
            size = 0
            for line in _lines(path):
                try:
                    result = read_result(line)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    break
                written.outcomes[result.custom_id] = result.outcome
                written.tokens = result.add_to(written.tokens)
                size += len(line)
            if size < path.stat().st_size:
                file = self._disk.open(path, os.O_WRONLY)
                try:
                    self._disk.truncate(file, size)
                finally:
                    os.close(file)
        return written

    def sync_results(self, batch_id: str) -> None:
        """Return once the results will survive a power cut."""
        for suffix in (OUTPUT, ERRORS):
            path = self.part(batch_id, suffix)
            if path.exists():
                file = self._disk.open(path, os.O_WRONLY)
                try:
                    self._disk.sync(file)
                finally:
                    os.close(file)

    def keep_results(self, batch_id: str, suffix: str, record: StoredFile) -> StoredFile:
        """Make the results of a batch a file. May be repeated after a crash. Returns the record with its size."""
        source, target = self.part(batch_id, suffix), self.part(record.id, DATA)
        if source.exists():
            self._disk.replace(source, target)
        record = msgspec.structs.replace(record, size_bytes=target.stat().st_size)
        self.write(record)
        return record

    def _make(self) -> None:
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while (line := file.readline(_LINE_BYTES_MAX)).endswith(b"\n"):
            yield line


T = TypeVar("T")

# Maximum number of files and of batches, whose records are in memory.
RECORDS_MAX: Final = 10_000
RETRY_AFTER_S: Final = 30.0


class NoSuchFile(ApiError):
    def __init__(self, file_id: str) -> None:
        super().__init__(404, f"No such File object: {file_id[:100]}.", param="id", code="file_not_found")


class NoSuchBatch(ApiError):
    def __init__(self, batch_id: str) -> None:
        super().__init__(404, f"No batch found with id '{batch_id[:100]}'.", code="batch_not_found")


class BatchStore:
    """Owner of the records. Methods run on the event loop and raise `ApiError`.

    Its disk space is shared: while there are several keys, one may use half of it.
    """

    def __init__(
        self,
        path: Path,
        settings: Callable[[], BatchesConfig],
        has_others: Callable[[], bool],
        make_thread: MakeThread = single_thread,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        self.folder = BatchFolder(path, disk)
        self._settings = settings
        self._has_others = has_others
        self._thread = make_thread("batches")
        # Records by id, the oldest first, and the bytes of each on the disk.
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, StoredBatch] = {}
        self._sizes: dict[str, int] = {}

    async def load(self) -> None:
        """Read what an earlier daemon has stored."""
        if not self.folder.exists:
            return

        def load() -> dict[str, int]:
            content = self.folder.load()
            for name in content.unreadable:
                log.error("batches: %s cannot be read and is left alone", name)
            self.files = {file.id: file for file in content.files}
            self.batches = {batch.id: batch for batch in content.batches}
            return {name: self.folder.size_of(name) for name in (*self.files, *self.batches)}

        self._sizes = await self.run(load)

    def close(self) -> None:
        """Finish all writes."""
        self._thread.shutdown()

    async def run(self, action: Callable[[], T]) -> T:
        """Call `action` in the thread. Raises `Unavailable` if the disk fails; the log has the reason."""
        try:
            return await asyncio.wrap_future(self._thread.submit(action))
        except OSError as error:
            log.error("batches: the disk fails: %s", error)
            raise Unavailable("The server cannot store this now; its log says why.", RETRY_AFTER_S) from error

    def submit(self, action: Callable[[], None]) -> None:
        """Call `action` in the thread without waiting for it. A failure of the disk is logged."""

        def act() -> None:
            try:
                action()
            except OSError as error:
                log.error("batches: the disk fails: %s", error)

        self._thread.submit(act)

    # -- bounds ------------------------------------------------------------------------------------------------------

    def check_on(self) -> None:
        """Raises `BadRequest` if batches are off."""
        if not self._settings().disk_bytes:
            raise BadRequest("Batches are off on this server ([batches] disk = 0).", code="batches_off")

    def room_bytes(self, tenant: str) -> int:
        """Return the disk space that is left for a tenant."""
        limit = self._settings().disk_bytes
        left = limit - sum(self._sizes.values())
        if self._has_others():
            own = sum(size for name, size in self._sizes.items() if self._tenant(name) == tenant)
            left = min(left, limit // 2 - own)
        return max(0, left)

    def check_room(self, tenant: str, size_bytes: int) -> None:
        """Raises `ApiError` 413 unless so many more bytes, and one more record, find room."""
        room = self.room_bytes(tenant)
        if size_bytes > room:
            message = f"No room: {room} bytes are left for files and batches. Delete some, or wait until they expire."
            raise ApiError(413, message, code="storage_full")
        if len(self.files) + len(self.batches) >= RECORDS_MAX:
            message = f"There are {RECORDS_MAX} files and batches. Delete some, or wait until they expire."
            raise ApiError(413, message, code="storage_full")

    def grow(self, name: str, size_bytes: int) -> None:
        """Count bytes that were written for a file, a batch or an upload."""
        self._sizes[name] = self._sizes.get(name, 0) + size_bytes

    def forget(self, name: str) -> None:
        """Stop counting the bytes of a file or a batch, or of an upload that has ended."""
        self._sizes.pop(name, None)

    def _tenant(self, name: str) -> str:
        record = self.files.get(name) or self.batches.get(name)
        return "" if record is None else record.tenant

    # -- records -----------------------------------------------------------------------------------------------------

    def file(self, tenant: str, file_id: str) -> StoredFile:
        """Return a tenant's file. Raises `NoSuchFile`."""
        file = self.files.get(file_id)
        if file is None or file.tenant != tenant:
            raise NoSuchFile(file_id)
        return file

    def batch(self, tenant: str, batch_id: str, *, is_anthropic: bool) -> StoredBatch:
        """Return a tenant's batch that was made in this dialect. Raises `NoSuchBatch`."""
        batch = self.batches.get(batch_id)
        if batch is None or batch.tenant != tenant or batch.is_anthropic is not is_anthropic:
            raise NoSuchBatch(batch_id)
        return batch

    def batches_of(self, tenant: str, *, is_anthropic: bool) -> list[StoredBatch]:
        """Return a tenant's batches of a dialect, the newest first."""
        own = (each for each in reversed(self.batches.values()) if each.tenant == tenant)
        return [each for each in own if each.is_anthropic is is_anthropic]

    async def update(self, batch: StoredBatch) -> None:
        """Replace a batch's record."""
        self.batches[batch.id] = batch
        await self.run(lambda: self.folder.write(batch))

    async def add_upload(self, path: Path, size_bytes: int, record: StoredFile | StoredBatch) -> None:
        """Add an uploaded file, or a batch whose requests were uploaded."""
        await self.run(lambda: self.folder.keep_upload(path, record))
        self._add(record, size_bytes)

    async def add_batch(self, batch: StoredBatch) -> None:
        """Add a batch of a file that was uploaded before."""
        await self.run(lambda: self.folder.link_input(batch))
        self._add(batch, self._sizes.get(batch.input_file, 0))

    async def add_results(self, batch: StoredBatch, suffix: str, record: StoredFile) -> None:
        """Make the results of a batch a file."""
        record = await self.run(lambda: self.folder.keep_results(batch.id, suffix, record))
        self._sizes[batch.id] = max(0, self._sizes.get(batch.id, 0) - record.size_bytes)
        self._add(record, record.size_bytes)

    async def drop_input(self, batch: StoredBatch) -> None:
        """Delete the input of a batch that has ended."""
        size = await self.run(lambda: self.folder.drop_input(batch.id))
        self._sizes[batch.id] = max(0, self._sizes.get(batch.id, 0) - size)

    async def delete(self, name: str) -> None:
        """Delete a file or a batch."""
        self.files.pop(name, None)
        self.batches.pop(name, None)
        self.forget(name)
        await self.run(lambda: self.folder.delete(name))

    async def read(self, file: StoredFile, offset: int, size: int) -> bytes:
        """Return a part of a file's content."""
        return await self.run(lambda: self.folder.read(self.folder.part(file.id, DATA), offset, size))

    def expired(self, now: float) -> Iterable[str]:
        """Return the ids of files and of ended batches whose time is over."""
        files = (file.id for file in self.files.values() if now >= (file.expires or file.created + RECORD_AGE_S))
        ended = (each for each in self.batches.values() if each.has_ended and now >= each.created + RECORD_AGE_S)
        return [*files, *(batch.id for batch in ended)]

    def _add(self, record: StoredFile | StoredBatch, size_bytes: int) -> None:
        if isinstance(record, StoredFile):
            self.files[record.id] = record
        else:
            self.batches[record.id] = record
        self._sizes[record.id] = size_bytes
