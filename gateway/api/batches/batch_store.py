"""Store of files and batches: their records in memory, and one thread that uses the folder."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, TypeVar

from gateway.api.batches.batch_folder import DATA, BatchFolder
from gateway.api.batches.records import RECORD_AGE_S, StoredBatch, StoredFile
from gateway.config.settings import BatchesConfig
from gateway.disk import SYSTEM_DISK, Disk
from gateway.errors import ApiError, BadRequest, Unavailable
from gateway.single_thread import MakeThread, single_thread

log = logging.getLogger(__name__)

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
