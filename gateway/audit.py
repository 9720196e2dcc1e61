"""Audit log: `logs/audit.log` in the home, mode 0600, one JSON object a line: changes of keys, orders of the operator,
reloads of the configuration, and each address that a key is first used from.

The daemon and every `mlxctl` append to it, without a lock: a line is one write at the end of the file. Only a rotation
is locked. No request without a key adds a line, so strangers cannot make it roll.
"""

import fcntl
import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from gateway.config import audit_path

MAX_BYTES: Final = 4 * 1024 * 1024
KEEP: Final = 8
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_APPEND: Final = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

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
    "request.cancel",
    "capture.read",
    "capture.clear",
    "config.reload",
    "daemon.drain",
]
Fact = str | int | float | bool | list[str] | None


class Actor(Struct, frozen=True):
    """Process that gave an order. `sudo_uid` is the account behind root, as sudo tells it."""

    uid: int | None = None
    pid: int | None = None
    sudo_uid: int | None = None


class Entry(Struct, frozen=True, kw_only=True):
    """One line. `target` is a key, model or request; `client` an address or `unix`; `outcome` ok or an error's code."""

    time: str
    action: Action
    target: str
    outcome: str
    client: str = ""
    uid: int | None = None
    pid: int | None = None
    sudo_uid: int | None = None
    facts: dict[str, Fact] = {}


class Audit:
    """Writer of one home's audit log."""

    def __init__(self, home: Path, clock: Callable[[], float] = time.time, max_bytes: int = MAX_BYTES) -> None:
        self._home = home
        self._name = audit_path(home).name
        self._clock = clock
        self._max_bytes = max_bytes

    def record(
        self,
        action: Action,
        target: str = "",
        *,
        outcome: str = "ok",
        client: str = "",
        actor: Actor | None = None,
        facts: Mapping[str, Fact] | None = None,
    ) -> None:
        """Append one line, on the disk when this returns. Without an `actor` it is this process. Raises `OSError`."""
        actor = this_process() if actor is None else actor
        entry = Entry(
            time=datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="milliseconds"),
            action=action,
            target=target,
            outcome=outcome,
            client=client,
            uid=actor.uid,
            pid=actor.pid,
            sudo_uid=actor.sudo_uid,
            facts=dict(facts or {}),
        )
        self._append(msgspec.json.encode(entry) + b"\n")

    def _append(self, line: bytes) -> None:
        with _Folder(self._home) as folder:
            file = folder.open(self._name)
            try:
                size = os.fstat(file).st_size
                if size and size + len(line) > self._max_bytes and folder.rotate(self._name, file):
                    os.close(file)
                    file = folder.open(self._name)
                    size = 0
                if size and os.pread(file, 1, size - 1) != b"\n":
                    line = b"\n" + line  # after half a line of a full disk
                written = os.write(file, line)
                os.fsync(file)
            finally:
                os.close(file)
        if written < len(line):
            raise OSError(f"{self._name}: only {written} of {len(line)} bytes were written")


class _Folder:
    """`logs` of a home, held open: root writes here in the homes of others, so no link is followed below the home."""

    def __init__(self, home: Path) -> None:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._owner = home.stat()
        with suppress(FileExistsError):
            (home / "logs").mkdir(mode=0o700)
        self._fd = os.open(home / "logs", _FOLDER | os.O_NOFOLLOW)
        self._give(self._fd)

    def __enter__(self) -> "_Folder":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def open(self, name: str) -> int:
        """The file, made if there is none. Raises `OSError`, also for what is no plain file."""
        try:
            file = os.open(name, _APPEND | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)
        except FileExistsError:
            file = os.open(name, _APPEND, dir_fd=self._fd)
        try:
            self._give(file)
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or (found.st_nlink != 1 and os.geteuid() == 0):
                raise OSError(f"{name} is no plain file with one name")
        except OSError:
            os.close(file)
            raise
        return file

    def rotate(self, name: str, file: int) -> bool:
        """Rename the full `file` and the older ones, unless another process has, or does at this moment."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            newest = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return True
        if not os.path.samestat(newest, os.fstat(file)):
            return True
        for number in range(KEEP - 1, -1, -1):
            older = f"{name}.{number}" if number else name
            with suppress(FileNotFoundError):
                os.rename(older, f"{name}.{number + 1}", src_dir_fd=self._fd, dst_dir_fd=self._fd)
        return True

    def _give(self, file: int) -> None:
        """Make the home's owner own what root has just made, which has no other name yet."""
        found = os.fstat(file)
        if os.geteuid() == 0 != self._owner.st_uid and found.st_uid == 0 and _is_fresh(found):
            os.fchown(file, self._owner.st_uid, self._owner.st_gid)


def _is_fresh(found: os.stat_result) -> bool:
    return stat.S_ISDIR(found.st_mode) or (found.st_nlink == 1 and found.st_size == 0)


def this_process() -> Actor:
    """The user who runs this program, and who became root for it."""
    sudo_uid = os.environ.get("SUDO_UID", "") if os.geteuid() == 0 else ""
    return Actor(os.getuid(), os.getpid(), int(sudo_uid) if sudo_uid.isdecimal() else None)
