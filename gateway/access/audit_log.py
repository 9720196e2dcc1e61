"""Audit log: `logs/audit.log` in the home, mode 0600, one JSON object a line. It records changes of keys, commands of
the operator, reloads of the configuration, and each address that a key is first used from.

The daemon and every `mlxctl` append to it without a lock, since a line is one write at the end of the file; only a
rotation is locked. Requests without a key add no lines, so unauthenticated clients cannot cause a rotation.

Audit log of the daemon. A thread writes it, so that neither requests nor the event loop wait for the disk.
"""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.command_failed import CommandFailed
from gateway.disk_and_clock import SYSTEM_DISK, Disk, MakeThread, single_thread
from gateway.state_dir import FolderRefused, HomeFolder, audit_path

log = logging.getLogger(__name__)

MAX_BYTES: Final = 4 * 1024 * 1024
KEEP: Final = 8
_APPEND: Final = os.O_RDWR | os.O_APPEND

Action = Literal[
    "key.create",
    "key.change",
    "key.rotate",
    "key.revoke",
    "key.address",
    "model.load",
    "model.unload",
    "model.restart",
    "model.pin",
    "model.unpin",
    "adapter.load",
    "adapter.unload",
    "request.cancel",
    "batch.cancel",
    "capture.read",
    "capture.clear",
    "config.reload",
    "daemon.drain",
    "daemon.undrain",
    "model.pull",
    "ui.code",
    "ui.login",
    "ui.revoke",
]
Fact = str | int | float | bool | list[str] | None


class AuditActor(Struct, frozen=True):
    """Process that gave a command. `sudo_uid` is the account that used sudo."""

    uid: int | None = None
    pid: int | None = None
    sudo_uid: int | None = None


class AuditEntry(Struct, frozen=True, kw_only=True):
    """One line. `target` is a key, model or request; `client` is an address or `unix`; `outcome` is `ok` or an error
    code.
    """

    time: str
    action: Action
    target: str
    outcome: str
    client: str = ""
    uid: int | None = None
    pid: int | None = None
    sudo_uid: int | None = None
    facts: dict[str, Fact] = {}


class AuditUnwritable(CommandFailed):
    """A line could not be written; the message gives the reason."""


class Audit:
    """Writer of one home's audit log."""

    def __init__(self, home: Path, max_bytes: int = MAX_BYTES, disk: Disk = SYSTEM_DISK) -> None:
        self._path = audit_path(home)
        self._folder = HomeFolder(self._path.parent)
        self._max_bytes = max_bytes
        self._disk = disk

    def record(self, entry: AuditEntry) -> None:
        """Append one line and sync it to the disk. Raises `AuditUnwritable`."""
        line = msgspec.json.encode(entry) + b"\n"
        try:
            with self._folder.open_or_create() as folder:
                self._append(folder, line)
        except (OSError, FolderRefused) as error:
            why = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise AuditUnwritable(f"{self._path}: {why}") from None

    def _append(self, folder: int, line: bytes) -> None:
        name = self._path.name
        file = self._folder.file(folder, name, _APPEND)
        try:
            size = os.fstat(file).st_size
            if size and size + len(line) > self._max_bytes and _rotate(folder, name, file):
                full, file = file, self._folder.file(folder, name, _APPEND)
                os.close(full)
                size = os.fstat(file).st_size
            if size and os.pread(file, 1, size - 1) != b"\n":
                line = b"\n" + line  # The newline ends the partial line that was written when the disk was full.
            written = self._disk.write(file, line)
            self._disk.sync(file)
        finally:
            os.close(file)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")


def entry(
    action: Action,
    target: str = "",
    *,
    outcome: str = "ok",
    client: str = "",
    actor: AuditActor | None = None,
    facts: Mapping[str, Fact] | None = None,
    clock: Callable[[], float] = time.time,
) -> AuditEntry:
    """Make a line with the current time. The default `actor` is this process."""
    actor = this_process() if actor is None else actor
    return AuditEntry(
        time=datetime.fromtimestamp(clock(), UTC).isoformat(timespec="milliseconds"),
        action=action,
        target=target,
        outcome=outcome,
        client=client,
        uid=actor.uid,
        pid=actor.pid,
        sudo_uid=actor.sudo_uid,
        facts=dict(facts or {}),
    )


def _rotate(folder: int, name: str, file: int) -> bool:
    """Rename the full `file` and the older ones, unless another process did. Returns False if another process is doing
    so.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        newest = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return True
    if not os.path.samestat(newest, os.fstat(file)):
        return True
    for number in range(KEEP - 1, -1, -1):
        older = f"{name}.{number}" if number else name
        with suppress(FileNotFoundError):
            os.rename(older, f"{name}.{number + 1}", src_dir_fd=folder, dst_dir_fd=folder)
    return True


def this_process() -> AuditActor:
    """Return this process, its user, and the account that used sudo."""
    sudo_uid = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    return AuditActor(os.getuid(), os.getpid(), int(sudo_uid) if sudo_uid.isdecimal() else None)


# Maximum number of pending lines. Further lines are lost and counted.
PENDING_MAX: Final = 1000


class AuditTrail:
    """Queue of audit lines, written in order. A line that is lost is counted and written to the daemon's
    log instead.
    """

    def __init__(self, audit: Audit, make_thread: MakeThread = single_thread) -> None:
        self._audit = audit
        self._thread = make_thread("audit")
        self._room = threading.Semaphore(PENDING_MAX)
        self.lost = 0

    def record(self, entry: AuditEntry) -> None:
        """Queue a line to be written."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._write, entry)
        else:
            self._lose(entry, "the disk does not keep up")

    def close(self) -> None:
        """Write all pending lines. No method may be called after this."""
        self._thread.shutdown()

    def _write(self, entry: AuditEntry) -> None:
        self._room.release()
        try:
            self._audit.record(entry)
        except AuditUnwritable as error:
            self._lose(entry, str(error))

    def _lose(self, entry: AuditEntry, why: str) -> None:
        self.lost += 1
        fields = {"action": entry.action, "target": entry.target, "outcome": entry.outcome, "uid": entry.uid}
        log.error("not in the audit log: %s", why, extra={"fields": fields})
