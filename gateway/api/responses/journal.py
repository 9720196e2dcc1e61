"""Journals: a file for each background response that runs, by which the next daemon goes on with it.

Events are shown to clients only once their tokens are written, so that no client ever has more than the file.
"""

import asyncio
import contextlib
import logging
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Final, TypeVar

from gateway.api.responses.journal_records import (
    MAGIC,
    BeginRecord,
    ContentRecord,
    JournaledRequest,
    Record,
    ShutdownRecord,
    framed,
    parsed,
)
from gateway.media.in_flight_bytes import share_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

SUFFIX: Final = ".journal"
# From one write of all journals to the next: a frame of a screen, and for fast models a write for several tokens.
PACE_S: Final = 0.02
# How long events wait for the disk. Then they are shown, and their response ends with its daemon.
STALL_S: Final = 2.0
# The same for the request, which may be large.
CREATE_S: Final = 10.0
FULL: Final = "the journals of all, or those of its key, fill [server] response_journal"
_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SYSCTL: Final = ("/usr/sbin/sysctl", "-n", "kern.bootsessionuuid")
_SYSCTL_S: Final = 5.0


@cache
def boot_id() -> str:
    """The boot of this machine, which a power cut ends; empty where the system does not say."""
    try:
        if _BOOT_ID.exists():
            return _BOOT_ID.read_text().strip()
        return subprocess.run(_SYSCTL, capture_output=True, text=True, timeout=_SYSCTL_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


class ResponseJournal:
    """The file of one response. Owned by its background; everything but the file itself belongs to the event loop.

    `is_sound` while what clients were shown is in the file. When that cannot be kept, the file goes and the events are
    shown without it.
    """

    def __init__(
        self, journals: "ResponseJournals", path: Path, show: Callable[[bytes], None], owner: str = ""
    ) -> None:
        self.path = path
        # The key whose share of the room it takes.
        self.owner = owner
        self.is_sound = True
        # Open for appending; None while it is being created, and once it is closed.
        self.file: int | None = None
        self.size_bytes = 0
        self._journals = journals
        self._show = show
        self._records: list[bytes] = []
        # Events of records that are written or wait for it, and how many of these the writing thread has.
        self._unshown: list[bytes] = []
        self._taken = 0
        self._settled: asyncio.Future[None] | None = None

    def put(self, record: Record | None, events: bytes) -> None:
        """Write a record, and show its events once that is done. Without a record they only keep their order."""
        if not self.is_sound or (record is None and not self._unshown):
            self._show(events)
            return
        if record is not None:
            frame = framed(record)
            if not self._journals.reserve(self, len(frame)):
                self.give_up(FULL)
                self._show(events)
                return
            self._records.append(frame)
        self._unshown.append(events)
        self._journals.wake(self)

    async def settle(self) -> None:
        """Return once everything before is shown. The journals' patience bounds it."""
        if self._unshown:
            if self._settled is None:
                self._settled = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._settled)

    async def leave(self) -> None:
        """Write the rest, to the disk itself, and close the file for the next daemon."""
        self.put(ShutdownRecord(), b"")
        await self.settle()
        if self.is_sound:
            await self._journals.close_file(self, is_kept=True)

    async def remove(self) -> None:
        """Delete the file, once what it stood for is kept elsewhere, or is to be nowhere."""
        await self.settle()
        if self.is_sound:
            self._show_all()
            await self._journals.close_file(self, is_kept=False)

    def give_up(self, reason: str) -> None:
        """Go on without the file."""
        if self.is_sound:
            self._journals.note_loss(self, reason)
            self._show_all()

    def _show_all(self) -> None:
        """From now on events are shown without being written."""
        self.is_sound = False
        self._records = []
        unshown, self._unshown, self._taken = self._unshown, [], 0
        for events in unshown:
            self._show(events)
        self._note_settled()

    # For the journals.

    def take(self) -> bytes:
        """Frames for the writing thread."""
        data, self._records, self._taken = b"".join(self._records), [], len(self._unshown)
        return data

    def written(self) -> None:
        """Show the events of the records that were taken: they are in the file."""
        if not self.is_sound:
            return
        shown, self._unshown, self._taken = self._unshown[: self._taken], self._unshown[self._taken :], 0
        for events in shown:
            if events:
                self._show(events)
        if not self._unshown:
            self._note_settled()

    def _note_settled(self) -> None:
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)
        self._settled = None


class ResponseJournals:
    """The folder of the journals. Belongs to the event loop, and its files to its threads.

    Records of all journals are written together, by a thread that is given the next ones when it is done with the last:
    the more there is, the less each costs. Files are created, read and deleted by another one, so that no large request
    holds up the tokens of others. `limit_bytes` is for all files; 0 keeps none. While `has_others` says that several
    keys share it, one may fill half.
    """

    def __init__(
        self,
        folder: Path,
        limit_bytes: Callable[[], int],
        problems: Counter[str],
        has_others: Callable[[], bool] = bool,
    ) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._has_others = has_others
        self._problems = problems
        self._writer = ThreadPoolExecutor(1, "journal")
        self._keeper = ThreadPoolExecutor(1, "journals")
        self._used_bytes = 0
        self._held = Counter[str]()
        self._dirty: dict[ResponseJournal, None] = {}
        self._writing: list[ResponseJournal] = []
        self._began = -PACE_S
        self._next: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def create(
        self, response_id: str, asked: JournaledRequest, about_bytes: int, show: Callable[[bytes], None]
    ) -> ResponseJournal:
        """The journal of a new response, whose request takes about so many bytes. One that cannot be is not sound."""
        journal = ResponseJournal(self, self._folder / f"{response_id}{SUFFIX}", show, asked.key or "")
        if not self.is_on:
            journal.is_sound = False
        elif not self.reserve(journal, about_bytes):
            journal.give_up(FULL)
        else:
            self._open(journal, about_bytes, lambda: _create(journal.path, asked, boot_id()))
        return journal

    def reopen(self, path: Path, content: ContentRecord, show: Callable[[bytes], None]) -> ResponseJournal:
        """The journal of a response that goes on: `BeginRecord` follows what it holds."""
        journal = ResponseJournal(self, path, show, content.asked.key or "")
        self._take(journal, content.whole_bytes)
        self._open(journal, content.whole_bytes, lambda: _reopen(path, content.whole_bytes, boot_id()))
        return journal

    @property
    def is_on(self) -> bool:
        return self._limit_bytes() > 0

    async def names(self) -> list[Path]:
        """The files that earlier daemons left, the oldest first."""
        return await self._keep(lambda: _names(self._folder))

    async def read(self, path: Path) -> ContentRecord:
        """Raises `NotUnderstood` and `OSError`."""
        return await self._keep(lambda: parsed(path.read_bytes()))

    async def discard(self, path: Path) -> None:
        """Delete a file that no response goes on from."""
        with contextlib.suppress(OSError):
            await self._keep(lambda: path.unlink(missing_ok=True))

    def close(self) -> None:
        """Finish what was begun. The last call."""
        for timer in (self._timer, self._next):
            if timer is not None:
                timer.cancel()
        self._keeper.shutdown()
        self._writer.shutdown()

    # For a journal.

    def reserve(self, journal: ResponseJournal, size_bytes: int) -> bool:
        """Whether there is room for so many bytes more, which is taken then."""
        limit = self._limit_bytes()
        is_within_share = self._held[journal.owner] + size_bytes <= share_bytes(limit, self._has_others())
        has_room = self._used_bytes + size_bytes <= limit and is_within_share
        if has_room:
            self._take(journal, size_bytes)
        return has_room

    def wake(self, journal: ResponseJournal) -> None:
        """It has something to write or to show."""
        if journal.file is not None:
            self._dirty[journal] = None
            self._schedule()

    def note_loss(self, journal: ResponseJournal, reason: str) -> None:
        """A journal is given up: its file is deleted, behind what is being written."""
        self._problems["journal"] += 1
        log.error("background response %s will not survive a restart: %s", journal.path.stem, reason)
        self._dirty.pop(journal, None)
        file, journal.file = journal.file, None
        self._free(journal)
        if file is not None:
            self._writer.submit(_close, file, journal.path, False)

    async def close_file(self, journal: ResponseJournal, *, is_kept: bool) -> None:
        """Close a file behind what is being written."""
        file, journal.file = journal.file, None
        self._dirty.pop(journal, None)
        self._free(journal)
        # One that was closed for the next daemon is deleted by its path.
        if file is not None or not is_kept:
            await asyncio.wrap_future(self._writer.submit(_close, file, journal.path, is_kept))

    def _take(self, journal: ResponseJournal, size_bytes: int) -> None:
        self._used_bytes += size_bytes
        self._held[journal.owner] += size_bytes
        journal.size_bytes += size_bytes

    def _free(self, journal: ResponseJournal) -> None:
        self._used_bytes -= journal.size_bytes
        self._held[journal.owner] -= journal.size_bytes
        if not self._held[journal.owner]:
            del self._held[journal.owner]
        journal.size_bytes = 0

    def _open(self, journal: ResponseJournal, about_bytes: int, open_file: Callable[[], int]) -> None:
        loop = asyncio.get_running_loop()
        patience = loop.call_later(CREATE_S, journal.give_up, "the disk does not keep up")

        def opened(future: Future[int]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(note, future)

        def note(future: Future[int]) -> None:
            patience.cancel()
            if (error := future.exception()) is not None:
                journal.give_up(f"its file cannot be written: {error}")
            elif not journal.is_sound:
                self._writer.submit(_close, future.result(), journal.path, False)
            else:
                journal.file = future.result()
                self._take(journal, os.fstat(journal.file).st_size - about_bytes)
                self.wake(journal)

        self._keeper.submit(open_file).add_done_callback(opened)

    def _schedule(self) -> None:
        """Write what is there: at once, or when it is time again."""
        if self._writing or self._next is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._began + PACE_S - loop.time()
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
            self._timer = loop.call_later(STALL_S, self._check)
        frames = [(journal.file, journal.take()) for journal in self._writing]

        def done(future: Future[list[OSError | None]]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(self._note_written, future.result())

        self._writer.submit(_append, frames).add_done_callback(done)

    def _note_written(self, errors: list[OSError | None]) -> None:
        written, self._writing = self._writing, []
        for journal, error in zip(written, errors, strict=True):
            if error is None:
                journal.written()
            else:
                journal.give_up(f"its file cannot be written: {error}")
        if self._dirty:
            self._schedule()

    def _check(self) -> None:
        # Armed once for many writes: it looks at the newest when it fires.
        loop = asyncio.get_running_loop()
        self._timer = None
        if not self._writing:
            return
        left_s = self._began + STALL_S - loop.time()
        if left_s <= 0:
            for journal in [*self._writing, *self._dirty]:
                journal.give_up("the disk does not keep up")
        # Those that come while the thread is still at it wait no longer than this either.
        self._timer = loop.call_later(left_s if left_s > 0 else STALL_S, self._check)

    async def _keep(self, action: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._keeper.submit(action))


# In the threads.


def _names(folder: Path) -> list[Path]:
    try:
        return sorted(folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime)
    except OSError:
        return []


def _create(path: Path, asked: JournaledRequest, boot: str) -> int:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with contextlib.ExitStack() as undo:
        undo.callback(_close, file, path, False)  # no half of a file stays
        _write_all(file, MAGIC + framed(asked) + framed(BeginRecord(boot)))
        undo.pop_all()
    return file


def _reopen(path: Path, whole_bytes: int, boot: str) -> int:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, file)  # the next daemon finds it as this one did
        os.ftruncate(file, whole_bytes)
        _write_all(file, framed(BeginRecord(boot)))
        undo.pop_all()
    return file


def _append(frames: list[tuple[int | None, bytes]]) -> list[OSError | None]:
    errors: list[OSError | None] = []
    for file, data in frames:
        try:
            if file is not None:
                _write_all(file, data)
            errors.append(None)
        except OSError as error:
            errors.append(error)
    return errors


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]


def _close(file: int | None, path: Path, is_kept: bool) -> None:
    try:
        if not is_kept:
            path.unlink(missing_ok=True)
        elif file is not None:
            os.fsync(file)
    except OSError as error:
        log.error("journal %s: %s", path.name, error)
    finally:
        if file is not None:
            os.close(file)
