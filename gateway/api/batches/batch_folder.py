"""Folder with files and batches: their records as JSON, the files' contents, and the results as they are written.

`ID.json` is the record of a file or a batch, written atomically. `FILE.data` is a file's content. A batch has `ID.in`,
a hard link to its input file's content, and the results `ID.out` and `ID.err`, to which whole lines are appended. When
the batch has ended, its results become the contents of files, or stay if it is Anthropic's.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

from gateway.api.batches.line_results import read_result
from gateway.api.batches.records import FILE_PREFIX, PREFIXES, BatchTokens, Outcome, StoredBatch, StoredFile, new_name
from gateway.disk import SYSTEM_DISK, Disk
from gateway.state_dir.private_file import write_private

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
