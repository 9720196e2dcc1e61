"""Lock of a home. It ensures that only one daemon runs in a home, and makes the home private."""

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Self

log = logging.getLogger(__name__)


class HomeUnusable(Exception):
    """The home cannot be used now; the message gives the reason."""


class RunDir:
    """The folder `run` of a home, mode 0700, with a lock that only one daemon can hold. The kernel releases the lock
    when the process ends.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "run"
        self._lock_fd = -1

    def __enter__(self) -> Self:
        """Create and lock the folder. Raises `HomeUnusable`."""
        try:
            self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(self.home)
            self.path.mkdir(mode=0o700, exist_ok=True)
            self.path.chmod(0o700)
            self._lock_fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise HomeUnusable(f"cannot use {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._lock_fd, 20, 0).decode(errors="replace").strip()
            self._close()
            who = f" (pid {holder})" if holder else ""
            raise HomeUnusable(
                f"another mlxd{who} runs in {self.home}; stop it, or set MLXD_HOME to another folder"
            ) from error
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, f"{os.getpid()}\n".encode(), 0)
        return self

    def __exit__(self, *_: object) -> None:
        # The file stays: if it were removed, two daemons could each lock a different file of the same name.
        with contextlib.suppress(OSError):
            os.ftruncate(self._lock_fd, 0)
        self._close()

    def _close(self) -> None:
        os.close(self._lock_fd)
        self._lock_fd = -1


def _make_private(home: Path) -> None:
    """Remove other users' access to a home that another program has made. Raises `HomeUnusable`, `OSError`."""
    folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            belongs = f"{home} belongs to user {status.st_uid}, and mlxd runs as {os.geteuid()}"
            raise HomeUnusable(f"{belongs}; run it as that user, or chown it")
        if status.st_mode & stat.S_ISVTX:
            raise HomeUnusable(f"{home} is a folder that users share; set MLXD_HOME to a folder of mlxd's own")
        if status.st_mode & 0o077:
            os.fchmod(folder, 0o700)
            log.warning("other users could enter %s (mode %04o): changed to 0700", home, stat.S_IMODE(status.st_mode))
    finally:
        os.close(folder)
