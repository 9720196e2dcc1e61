"""A folder in a home, opened so that root, who works in the homes of services, follows nothing of the service's user.

The user of a service may be somebody else's program by now. Root therefore goes through no symbolic link of that user,
opens the folder once and works in what it has opened, changes the owner of nothing but what it has just made, and
touches no file that has another name elsewhere. Everybody else works with their own rights, and links are their affair.
"""

import errno
import fcntl
import os
import stat
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gateway.failed import Failed

LOCK: Final = "lock"
LOCK_TIMEOUT_S: Final = 10.0
_LOCK_POLL_S: Final = 0.02
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_CLOEXEC | os.O_NONBLOCK


class FolderRefused(Failed):
    """The folder, or a file in it, is not what its home's owner would have made."""


class HomeFolder:
    """`keys/` or `logs/` in a home."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def reading(self) -> Generator[int, None, None]:
        """The open folder. Raises `OSError`, `FolderRefused`."""
        home = self._home()
        try:
            folder = self._opened(home)
        finally:
            os.close(home)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def changing(self) -> Generator[int, None, None]:
        """The open folder, made if need be, with no other change of it under way. Raises `OSError`, `FolderRefused`."""
        with self.made() as folder:
            lock = self._lock(folder)
            try:
                yield folder
            finally:
                os.close(lock)

    @contextmanager
    def made(self) -> Generator[int, None, None]:
        """The open folder, made if need be. Raises `OSError`, `FolderRefused`."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        home = self._home()
        try:
            folder = self._made(home)
        finally:
            os.close(home)
        try:
            yield folder
        finally:
            os.close(folder)

    def file(self, folder: int, name: str, flags: int) -> int:
        """A file in the open folder, made if need be: its descriptor. Raises `OSError`, `FolderRefused`."""
        flags |= os.O_NOFOLLOW | _FILE
        try:
            file = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            owner = os.fstat(folder)
            if _is_foreign(owner):
                os.fchown(file, owner.st_uid, owner.st_gid)
        except FileExistsError:
            file = os.open(name, flags, dir_fd=folder)
        try:
            self._check_file(folder, file, name)
        except BaseException:
            os.close(file)
            raise
        return file

    def read(self, folder: int, name: str) -> tuple[int, bytes]:
        """The mode and the content of a file in the open folder. Raises `OSError`, `FolderRefused`."""
        flags = os.O_RDONLY | _FILE
        if _is_foreign(os.fstat(folder)):
            flags |= os.O_NOFOLLOW
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            self._check_file(folder, file.fileno(), name)
            return os.fstat(file.fileno()).st_mode, file.read()

    def _home(self) -> int:
        home = self.path.parent
        if os.geteuid() == 0:
            for part in (home, *home.parents):
                if part.is_symlink() and (owner := part.lstat().st_uid) != 0:
                    raise FolderRefused(f"{part} is a symbolic link of user {owner}, which root does not follow")
        return os.open(home, _FOLDER)

    def _opened(self, home: int) -> int:
        owner = os.fstat(home)
        try:
            folder = os.open(self.path.name, _FOLDER | (os.O_NOFOLLOW if _is_foreign(owner) else 0), dir_fd=home)
        except OSError as error:
            # Linux says ENOTDIR of a link that is not followed, macOS ELOOP.
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and self.path.is_symlink():
                raise FolderRefused(f"{self.path} is a symbolic link, which root does not follow") from None
            raise
        if _is_foreign(owner) and (uid := os.fstat(folder).st_uid) != owner.st_uid:
            os.close(folder)
            raise FolderRefused(f"{self.path} is user {uid}'s, and the home user {owner.st_uid}'s; nothing was changed")
        return folder

    def _made(self, home: int) -> int:
        try:
            os.mkdir(self.path.name, 0o700, dir_fd=home)
        except FileExistsError:
            return self._opened(home)
        owner = os.fstat(home)
        if _is_foreign(owner):
            folder = os.open(self.path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=home)
            try:
                # What lies there now need not be what was made: an empty folder of root's is given away, nothing else.
                if os.fstat(folder).st_uid == 0 and not os.listdir(folder):
                    os.fchown(folder, owner.st_uid, owner.st_gid)
            finally:
                os.close(folder)
        return self._opened(home)

    def _lock(self, folder: int) -> int:
        lock = self.file(folder, LOCK, os.O_RDWR)
        try:
            self._acquire(lock)
        except BaseException:
            os.close(lock)
            raise
        return lock

    def _acquire(self, lock: int) -> None:
        end = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise FolderRefused(f"{self.path}: another change has not ended in {LOCK_TIMEOUT_S:g} s") from None
            time.sleep(_LOCK_POLL_S)

    def _check_file(self, folder: int, file: int, name: str) -> None:
        owner, found = os.fstat(folder), os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise FolderRefused(f"{self.path / name} is no file")
        if not _is_foreign(owner):
            return
        if found.st_uid != owner.st_uid:
            raise FolderRefused(f"{self.path / name} is user {found.st_uid}'s, and the home user {owner.st_uid}'s")
        if found.st_nlink > 1:
            raise FolderRefused(f"{self.path / name} has another name elsewhere, and may be another file")


def _is_foreign(owner: os.stat_result) -> bool:
    """Whether this is root in what belongs to another."""
    return os.geteuid() == 0 and owner.st_uid != 0
