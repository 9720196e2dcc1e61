"""Journals. Each running background response has a file from which the next daemon can resume it.

Events are published to clients only after their tokens were written, so no client ever has more than the file.

Records of a journal: the request, then each piece of the output. Their framing reveals a damaged end of the file.
"""

import asyncio
import contextlib
import logging
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.api.responses import response as out
from gateway.api.responses.request import InputItem, ToolIdentity
from gateway.disk_and_clock import SYSTEM_DISK, Disk, MakeThread, single_thread
from gateway.media.read_media import quota_bytes
from protocol.codec import UNREADABLE
from protocol.from_worker import Delta
from protocol.to_worker import Generate

log = logging.getLogger(__name__)

# First line of a file. Each format has its own, so that no version reads a format that it does not know.
MAGIC: Final = b"mlxd-journal 1\n"
# Each record is preceded by its length and its CRC-32.
_HEAD: Final = struct.Struct("<II")


class JournaledRequest(Struct, frozen=True, omit_defaults=True):
    """First record of a journal: a background response before its first token, with all that its generation needs.

    `key` is the name of the caller's key, and `owner` owns what that key stores; `path` is the path of the model's
    weights. `began` is wall-clock time; `limit_s` 0 means no limit. `inputs` are the response's input items as they are
    stored. `is_everybodys` is set if the caller was anonymous.
    """

    key: str | None
    model: str
    path: str
    request_id: str
    response: out.Response
    generate: Generate
    inputs: list[InputItem]
    forms: Mapping[str, ToolIdentity]
    is_sealed: bool
    body_bytes: int
    began: float
    limit_s: float = 0.0
    is_everybodys: bool = False
    owner: str = ""

    @property
    def tenant(self) -> str:
        """Owner of the response. A journal of an earlier version has only the name of the key."""
        return self.owner or self.key or ""


class BeginRecord(Struct, frozen=True, array_like=True, tag=1):
    """Record with which each daemon begins its part. `boot` is the id of the machine's boot; empty if unknown."""

    boot: str


class StartRecord(Struct, frozen=True, array_like=True, tag=2):
    """Record that the request was given to a worker."""


class DeltaRecord(Struct, frozen=True, array_like=True, tag=3):
    """Deltas that were encoded together. Encoding them together again gives their events the same numbers.

    `truncated` has the numbers of turns and of tokens that were left out of the prompt.
    """

    deltas: list[Delta]
    truncated: tuple[int, int] = (0, 0)


class ShutdownRecord(Struct, frozen=True, array_like=True, tag=4):
    """Record of an orderly shutdown of the daemon: all earlier records are on the disk."""


Record = BeginRecord | StartRecord | DeltaRecord | ShutdownRecord


@dataclass(frozen=True, slots=True)
class ContentRecord:
    """Content of a journal. `whole_bytes` is the position after the last complete record."""

    request: JournaledRequest
    records: list[Record]
    whole_bytes: int


# The first record of a journal of which a power cut has left the request alone.
LOST_BEGIN: Final = BeginRecord("")


class NotUnderstood(Exception):
    """Raised if the file is no journal, or a journal of another version."""


_encode = msgspec.msgpack.Encoder().encode
_request: msgspec.msgpack.Decoder[JournaledRequest] = msgspec.msgpack.Decoder(JournaledRequest)
_record: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def framed(record: Record | JournaledRequest) -> bytes:
    """Encode a record with its frame."""
    payload = _encode(record)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def parsed(data: bytes) -> ContentRecord:
    """Return the content of a file up to the first record that is cut off or damaged. Raises `NotUnderstood`."""
    if not data.startswith(MAGIC):
        raise NotUnderstood("its first line is another")
    first, place = _payload(data, len(MAGIC))
    try:
        request = _request.decode(first)
        records: list[Record] = []
        whole_bytes = place
        while True:
            payload, place = _payload(data, place)
            if not payload:
                return ContentRecord(request, records, whole_bytes)
            records.append(_record.decode(payload))
            whole_bytes = place
    except UNREADABLE as error:
        raise NotUnderstood(str(error)) from None


def _payload(data: bytes, place: int) -> tuple[memoryview, int]:
    """Return the payload of the record that begins at `place`, empty if there is none, and the position of its end."""
    begin = place + _HEAD.size
    if begin > len(data):
        return memoryview(b""), place
    size, checksum = _HEAD.unpack_from(data, place)
    payload = memoryview(data)[begin : begin + size]
    if len(payload) < size or zlib.crc32(payload) != checksum:
        return memoryview(b""), place
    return payload, begin + size


T = TypeVar("T")

SUFFIX: Final = ".journal"
# Maximum size of the journals of all running responses together.
JOURNALS_BYTES_MAX: Final = 256 * 1024 * 1024
# Minimum time between two writes of the journals: about a frame of a screen, and several tokens of a fast model.
WRITE_INTERVAL_S: Final = 0.02
# Maximum time that events wait for the disk, or that the creation of a file, which contains a large request, may take.
# After this time the journal is abandoned, and its response ends with the daemon.
WRITE_TIMEOUT_S: Final = 2.0
CREATE_TIMEOUT_S: Final = 10.0
# A timer that fires so much later than its time was due says nothing about the disk: the whole process did not run.
LATE_S: Final = 0.5
_JOURNALS_FULL: Final = "the journals of all, or those of its key, have no room for it"


class ResponseJournal:
    """Journal of one response. Except for work on the file, it is used on the event loop only.

    `is_sound` is true while the file has everything that was published to clients. A file that can no longer be written
    is deleted, and events are then published without it. `owner` is the key whose quota of the size limit the file
    uses. `file` is the file open for appending; None while it is being created, and after it is closed.
    """

    def __init__(
        self, journals: "ResponseJournals", path: Path, show: Callable[[bytes], None], owner: str = ""
    ) -> None:
        self.path = path
        self.owner = owner
        self.is_sound = True
        self.file: int | None = None
        self.size_bytes = 0
        self._journals = journals
        self._show = show
        self._records: list[bytes] = []
        # Events that wait for their records to be written. The thread is now writing the records of the first
        # `_writing` events.
        self._unshown: list[bytes] = []
        self._writing = 0
        self._published: asyncio.Future[None] | None = None
        self._has_begun = False
        self._begun: asyncio.Future[None] | None = None

    async def begin(self) -> None:
        """Return once the file has the request, after at most CREATE_TIMEOUT_S. From then on the next daemon knows the
        response, unless the journal is not sound.
        """
        if self.is_sound and not self._has_begun:
            if self._begun is None:
                self._begun = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._begun)

    def note_begun(self) -> None:
        self._has_begun = True
        if self._begun is not None and not self._begun.done():
            self._begun.set_result(None)

    def append(self, record: Record | None, events: bytes) -> None:
        """Write a record, then publish its events. Events without a record are published in order with the others."""
        if not self.is_sound or (record is None and not self._unshown):
            self._show(events)
            return
        if record is not None:
            frame = framed(record)
            if not self._journals.reserve(self, len(frame)):
                self.abandon(_JOURNALS_FULL)
                self._show(events)
                return
            self._records.append(frame)
        self._unshown.append(events)
        self._journals.wake(self)

    async def wait_published(self) -> None:
        """Return once all earlier events are published, after at most WRITE_TIMEOUT_S."""
        if self._unshown:
            if self._published is None:
                self._published = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._published)

    async def leave(self) -> None:
        """Write the remaining records, sync the file to the disk, and close it for the next daemon."""
        self.append(ShutdownRecord(), b"")
        await self.wait_published()
        if self.is_sound:
            await self._journals.close_file(self, is_kept=True)

    async def remove(self) -> None:
        """Delete the file, because the response is stored or is not to be stored."""
        await self.wait_published()
        if self.is_sound:
            self._show_all()
            await self._journals.close_file(self, is_kept=False)

    def abandon(self, reason: str) -> None:
        """Give the file up and continue without it."""
        if self.is_sound:
            self._journals.note_loss(self, reason)
            self._show_all()

    def _show_all(self) -> None:
        """Publish all waiting events, and publish later events without writing them."""
        self.is_sound = False
        self._records = []
        unshown, self._unshown, self._writing = self._unshown, [], 0
        for events in unshown:
            self._show(events)
        self._note_published()
        self.note_begun()

    def begin_write(self) -> bytes:
        """Return the records that the thread is to write now, encoded as frames."""
        data, self._records, self._writing = b"".join(self._records), [], len(self._unshown)
        return data

    def end_write(self) -> None:
        """Publish the events whose records are now in the file."""
        if not self.is_sound:
            return
        shown, self._unshown, self._writing = self._unshown[: self._writing], self._unshown[self._writing :], 0
        for events in shown:
            if events:
                self._show(events)
        if not self._unshown:
            self._note_published()

    def _note_published(self) -> None:
        if self._published is not None and not self._published.done():
            self._published.set_result(None)
        self._published = None


class ResponseJournals:
    """Folder of the journals. Used on the event loop only; threads work on the files.

    One thread writes the records of all journals, batch after batch, so that a slow disk gets larger batches. Another
    thread creates, reads and deletes files, so that a large request does not delay the tokens of others. `limit_bytes`
    limits the size of all files together; 0 turns journals off. While `has_others` is true, other keys exist, and each
    key may use half of it.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: Callable[[], int],
        problems: Counter[str],
        has_others: Callable[[], bool] = bool,
        make_thread: MakeThread = single_thread,
        disk: Disk = SYSTEM_DISK,
    ) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._has_others = has_others
        self._problems = problems
        self._disk = disk
        self._writer = make_thread("journal")
        self._opener = make_thread("journals")
        self._held = Counter[str]()
        self._dirty: dict[ResponseJournal, None] = {}
        self._writing: list[ResponseJournal] = []
        self._began = -WRITE_INTERVAL_S
        self._next: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def create(
        self, response_id: str, request: JournaledRequest, about_bytes: int, show: Callable[[bytes], None]
    ) -> ResponseJournal:
        """Create the journal of a new response, of about `about_bytes`. If there is no room, the journal is
        not sound.
        """
        journal = ResponseJournal(self, self._folder / f"{response_id}{SUFFIX}", show, request.tenant)
        if not self.is_on:
            journal.is_sound = False
        elif not self.reserve(journal, about_bytes):
            journal.abandon(_JOURNALS_FULL)
        else:
            self._open(journal, about_bytes, lambda: _create(self._disk, journal.path, request))
        return journal

    def reopen(self, path: Path, content: ContentRecord, show: Callable[[bytes], None]) -> ResponseJournal:
        """Reopen the journal of a response that is being resumed, and append a `BeginRecord`."""
        journal = ResponseJournal(self, path, show, content.request.tenant)
        self._count(journal, content.whole_bytes)
        self._open(journal, content.whole_bytes, lambda: _reopen(self._disk, path, content))
        return journal

    @property
    def is_on(self) -> bool:
        return self._limit_bytes() > 0

    def boot_id(self) -> str:
        """Return the id of the boot in which this daemon writes."""
        return self._disk.boot_id()

    async def paths(self) -> list[Path]:
        """Return the files that earlier daemons left, the oldest first."""
        return await self._on_files(lambda: _paths(self._folder))

    async def read(self, path: Path) -> ContentRecord:
        """Read a file. Raises `NotUnderstood` and `OSError`."""
        return await self._on_files(lambda: parsed(path.read_bytes()))

    async def discard(self, path: Path) -> None:
        """Delete a file from which no response will be resumed."""
        with contextlib.suppress(OSError):
            await self._on_files(lambda: self._disk.unlink(path))

    def close(self) -> None:
        """Finish pending work. No method may be called after this."""
        for timer in (self._timer, self._next):
            if timer is not None:
                timer.cancel()
        self._opener.shutdown()
        self._writer.shutdown()

    def reserve(self, journal: ResponseJournal, size_bytes: int) -> bool:
        """Reserve `size_bytes` more for a journal. Returns False if there is no room."""
        limit = self._limit_bytes()
        is_within_quota = self._held[journal.owner] + size_bytes <= quota_bytes(limit, self._has_others())
        has_room = self._held.total() + size_bytes <= limit and is_within_quota
        if has_room:
            self._count(journal, size_bytes)
        return has_room

    def wake(self, journal: ResponseJournal) -> None:
        """Schedule a write for a journal that has records or events waiting."""
        if journal.file is not None:
            self._dirty[journal] = None
            self._schedule()

    def note_loss(self, journal: ResponseJournal, reason: str) -> None:
        """Count and log the loss of a journal, and delete its file after the current write."""
        self._problems["journal"] += 1
        log.error("background response %s will not survive a restart: %s", journal.path.stem, reason)
        # A file that could not be reopened is deleted by its path.
        self._writer.submit(_close, self._disk, self._detach(journal), journal.path, False)

    async def close_file(self, journal: ResponseJournal, *, is_kept: bool) -> None:
        """Close a file after the current write."""
        file = self._detach(journal)
        # A file that was closed for the next daemon is deleted by its path.
        if file is not None or not is_kept:
            await asyncio.wrap_future(self._writer.submit(_close, self._disk, file, journal.path, is_kept))

    def _count(self, journal: ResponseJournal, size_bytes: int) -> None:
        self._held[journal.owner] += size_bytes
        journal.size_bytes += size_bytes

    def _detach(self, journal: ResponseJournal) -> int | None:
        """Remove a journal from the folder's accounts, free its bytes, and return its open file."""
        self._dirty.pop(journal, None)
        self._held[journal.owner] -= journal.size_bytes
        if not self._held[journal.owner]:
            del self._held[journal.owner]
        journal.size_bytes = 0
        file, journal.file = journal.file, None
        return file

    def _open(self, journal: ResponseJournal, about_bytes: int, open_file: Callable[[], int]) -> None:
        loop = asyncio.get_running_loop()

        def give_up() -> None:
            nonlocal timeout
            if _is_late(timeout.when()):
                timeout = loop.call_later(CREATE_TIMEOUT_S, give_up)
            else:
                journal.abandon("the disk does not keep up")

        timeout = loop.call_later(CREATE_TIMEOUT_S, give_up)

        def note(future: Future[int]) -> None:
            timeout.cancel()
            if (error := future.exception()) is not None:
                journal.abandon(f"its file cannot be written: {error}")
            elif not journal.is_sound:
                self._writer.submit(_close, self._disk, future.result(), journal.path, False)
            else:
                journal.file = future.result()
                self._count(journal, os.fstat(journal.file).st_size - about_bytes)
                journal.note_begun()
                self.wake(journal)

        _call_back(self._opener.submit(open_file), note)

    def _schedule(self) -> None:
        """Start a write now, or WRITE_INTERVAL_S after the last write."""
        if self._writing or self._next is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._began + WRITE_INTERVAL_S - loop.time()
        if wait_s <= 0:
            self._write()
        else:
            self._next = loop.call_later(wait_s, self._write)

    def _write(self) -> None:
        loop = asyncio.get_running_loop()
        self._next = None
        if not self._dirty:
            return
        self._writing = list(self._dirty)
        self._dirty = {}
        self._began = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(WRITE_TIMEOUT_S, self._check)
        frames = [(journal.file, journal.begin_write()) for journal in self._writing]

        _call_back(self._writer.submit(_append, self._disk, frames), self._note_written)

    def _note_written(self, write: Future[list[OSError | None]]) -> None:
        written, self._writing = self._writing, []
        for journal, error in zip(written, write.result(), strict=True):
            if error is None:
                journal.end_write()
            else:
                journal.abandon(f"its file cannot be written: {error}")
        if self._dirty:
            self._schedule()

    def _check(self) -> None:
        # The timer is not restarted for each write: when it fires, it checks the newest write.
        loop = asyncio.get_running_loop()
        is_late, self._timer = self._timer is not None and _is_late(self._timer.when()), None
        if not self._writing:
            return
        left_s = WRITE_TIMEOUT_S if is_late else self._began + WRITE_TIMEOUT_S - loop.time()
        if left_s <= 0:
            for journal in [*self._writing, *self._dirty]:
                journal.abandon("the disk does not keep up")
        # Records that arrived while the thread was writing wait at most WRITE_TIMEOUT_S too.
        self._timer = loop.call_later(left_s if left_s > 0 else WRITE_TIMEOUT_S, self._check)

    async def _on_files(self, action: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._opener.submit(action))


def _is_late(due: float) -> bool:
    """Whether a timer for this time of the event loop's clock fires too late to say anything about the disk."""
    return asyncio.get_running_loop().time() - due > LATE_S


def _call_back(call: Future[T], note: Callable[[Future[T]], None]) -> None:
    """Call `note` on the event loop when a thread's call has ended, unless the loop has ended before."""
    loop = asyncio.get_running_loop()

    def done(call: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(note, call)

    call.add_done_callback(done)


def _paths(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return []


def _create(disk: Disk, path: Path, request: JournaledRequest) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW)
    with contextlib.ExitStack() as undo:
        undo.callback(_close, disk, file, path, False)
        disk.write_all(file, MAGIC + framed(request) + framed(BeginRecord(disk.boot_id())))
        undo.pop_all()
    return file


def _reopen(disk: Disk, path: Path, content: ContentRecord) -> int:
    file = disk.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, file)
        disk.truncate(file, content.whole_bytes)
        lost = b"" if content.records else framed(LOST_BEGIN)
        disk.write_all(file, lost + framed(BeginRecord(disk.boot_id())))
        undo.pop_all()
    return file


def _append(disk: Disk, frames: list[tuple[int | None, bytes]]) -> list[OSError | None]:
    errors: list[OSError | None] = []
    for file, data in frames:
        try:
            if file is not None:
                disk.write_all(file, data)
            errors.append(None)
        except OSError as error:
            errors.append(error)
    return errors


def _close(disk: Disk, file: int | None, path: Path, is_kept: bool) -> None:
    try:
        if not is_kept:
            with contextlib.suppress(FileNotFoundError):
                disk.unlink(path)
        elif file is not None:
            disk.sync(file)
    except OSError as error:
        log.error("journal %s: %s", path.name, error)
    finally:
        if file is not None:
            os.close(file)
