"""MLXD_HOME: its paths, its folders, its lock, and files that only its user may read.

Paths of a home: its sockets, keys, logs and state.

Folders of a home, opened so that root can safely work in the homes of services.

An attacker may have taken over a program that runs as a service's user. Root therefore follows no symbolic link of that
user, opens the folder once and works inside the open folder, changes only the owner of files that it has just made, and
touches no file with another hard link. Users other than root work with their own rights and may use links as they like.

Lock of a home. It ensures that only one daemon runs in a home, and makes the home private.

Atomic writes of files that only their owner may read.

Snapshots of what a process counts, written to a private file by several threads. A newer snapshot always wins.
"""

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

from gateway.command_failed import CommandFailed
from gateway.disk_and_clock import SYSTEM_DISK, Disk

log = logging.getLogger(__name__)

DEFAULT_HOME: Final = "~/.mlxd"


def default_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `MLXD_HOME`, or `~/.mlxd`."""
    return Path(environ.get("MLXD_HOME") or DEFAULT_HOME).expanduser().absolute()


def run_dir(home: Path) -> Path:
    """Return the folder of a daemon's sockets and lock."""
    return home / "run"


def admin_socket(home: Path) -> Path:
    """Return the path of the unix socket on which the daemon of a home listens for mlxctl."""
    return run_dir(home) / "admin.sock"


def keys_path(home: Path) -> Path:
    """Return the path of the file with a home's API keys."""
    return home / "keys" / "keys.json"


def usage_path(home: Path) -> Path:
    """Return the path of the file with the usage of a home's API keys."""
    return home / "state" / "usage.json"


def sessions_path(home: Path) -> Path:
    """Return the path of the file with the sessions of a home's page."""
    return home / "state" / "sessions.json"


def connected_path(home: Path, client: str) -> Path:
    """Return the path of the file with what `mlxctl connect` has written for a client, which `--undo` reads."""
    return home / "state" / "clients" / f"{client}.json"


def log_path(home: Path) -> Path:
    """Return the path of a home's log file. Rotated files are next to it."""
    return home / "logs" / "mlxd.log"


def audit_path(home: Path) -> Path:
    """Return the path of a home's audit log. Rotated files are next to it."""
    return home / "logs" / "audit.log"


LOCK: Final = "lock"
LOCK_TIMEOUT_S: Final = 10.0
_LOCK_POLL_S: Final = 0.02
# Linux follows at most this many symbolic links in one path.
LINKS_MAX: Final = 40
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE: Final = os.O_CLOEXEC | os.O_NONBLOCK


class FolderRefused(CommandFailed):
    """The folder, or a file in it, is refused: it is a symbolic link, has the wrong owner or type, or has another hard
    link.
    """


class HomeFolder:
    """The folder `keys/` or `logs/` in a home."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def open_existing(self) -> Generator[int, None, None]:
        """Open the folder and yield its descriptor. Raises `OSError`, `FolderRefused`."""
        with _closing(open_folder(self.path.parent)) as home:
            folder = self._open(home)
        with _closing(folder):
            yield folder

    @contextlib.contextmanager
    def open_or_create(self) -> Generator[int, None, None]:
        """Open the folder, create it if it is missing, and yield its descriptor. Raises `OSError`, `FolderRefused`."""
        with _closing(open_folder(self.path.parent, make=True)) as home:
            folder = self._open_or_create(home)
        with _closing(folder):
            yield folder

    @contextlib.contextmanager
    def open_locked(self) -> Generator[int, None, None]:
        """Open or create the folder, lock it against other changes, and yield its descriptor. Raises `OSError`,
        `FolderRefused`.
        """
        with self.open_or_create() as folder, _closing(self.file(folder, LOCK, os.O_RDWR)) as lock:
            self._acquire(lock)
            yield folder

    def file(self, folder: int, name: str, flags: int) -> int:
        """Open a file in the open folder, and create it if it is missing. Raises `OSError`, `FolderRefused`."""
        flags |= os.O_NOFOLLOW | _FILE
        try:
            file = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            owner = os.fstat(folder)
            if _is_foreign(owner):
                os.fchown(file, owner.st_uid, owner.st_gid)
        except FileExistsError:
            file = os.open(name, flags, dir_fd=folder)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, file)
            self._check_file(folder, file, name)
            undo.pop_all()
        return file

    def read(self, folder: int, name: str) -> tuple[int, bytes]:
        """Return the mode and the content of a file in the open folder. Raises `OSError`, `FolderRefused`."""
        flags = os.O_RDONLY | _FILE
        if _is_foreign(os.fstat(folder)):
            flags |= os.O_NOFOLLOW
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            self._check_file(folder, file.fileno(), name)
            return os.fstat(file.fileno()).st_mode, file.read()

    def _open(self, home: int) -> int:
        owner = os.fstat(home)
        try:
            folder = os.open(self.path.name, _FOLDER | (os.O_NOFOLLOW if _is_foreign(owner) else 0), dir_fd=home)
        except OSError as error:
            # Opening a symbolic link with O_NOFOLLOW fails with ENOTDIR on Linux and with ELOOP on macOS.
            if error.errno in (errno.ELOOP, errno.ENOTDIR) and self.path.is_symlink():
                raise FolderRefused(f"{self.path} is a symbolic link, which root does not follow") from None
            raise
        if _is_foreign(owner) and (uid := os.fstat(folder).st_uid) != owner.st_uid:
            os.close(folder)
            raise FolderRefused(f"{self.path} is user {uid}'s, and the home user {owner.st_uid}'s; nothing was changed")
        return folder

    def _open_or_create(self, home: int) -> int:
        try:
            os.mkdir(self.path.name, 0o700, dir_fd=home)
        except FileExistsError:
            return self._open(home)
        owner = os.fstat(home)
        if _is_foreign(owner):
            with _closing(os.open(self.path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=home)) as folder:
                # The folder may have been replaced since `mkdir`, so its owner is changed only if it is empty and
                # belongs to root.
                if os.fstat(folder).st_uid == 0 and not os.listdir(folder):
                    os.fchown(folder, owner.st_uid, owner.st_gid)
        return self._open(home)

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
        owner, status = os.fstat(folder), os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise FolderRefused(f"{self.path / name} is no file")
        if not _is_foreign(owner):
            return
        if status.st_uid != owner.st_uid:
            raise FolderRefused(f"{self.path / name} is user {status.st_uid}'s, and the home user {owner.st_uid}'s")
        if status.st_nlink > 1:
            raise FolderRefused(f"{self.path / name} has another name elsewhere, and may be another file")


def open_folder(path: Path, *, make: bool = False) -> int:
    """Open a folder, and create it with `make`. Root follows a symbolic link only if root owns it and the folder it is
    in.

    Raises `OSError`, `FolderRefused`.
    """
    if make and os.geteuid() != 0:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() != 0:
        return os.open(path, _FOLDER)
    at, left = "", list(path.absolute().parts[1:])
    folder, links = os.open("/", _FOLDER), 0
    with contextlib.ExitStack() as undo:
        undo.callback(lambda: os.close(folder))  # The lambda closes whichever folder is open when an error occurs.
        while left:
            name = left.pop(0)
            if (target := _root_link(folder, at, name)) is not None:
                links += 1
                if links > LINKS_MAX:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                left = [*target.parts, *left]
                continue
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, 0o755 if left else 0o700, dir_fd=folder)
            flags = _FOLDER if name == "/" else _FOLDER | os.O_NOFOLLOW
            inner = os.open(name, flags, dir_fd=folder)
            os.close(folder)
            folder, at = inner, "" if name == "/" else f"{at}/{name}"
        undo.pop_all()
    return folder


def private_folder(path: Path, uid: int, gid: int) -> None:
    """Create the folder `path`, or check an existing one, and let only `uid` enter it.

    An existing folder must belong to that user and must not be a symbolic link. Raises `OSError`, `FolderRefused`.
    """
    with _closing(open_folder(path.parent, make=True)) as parent:
        is_new = True
        try:
            os.mkdir(path.name, 0o700, dir_fd=parent)
        except FileExistsError:
            is_new = False
        if stat.S_ISLNK(os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_mode):
            raise FolderRefused(f"{path} is a symbolic link; name the folder itself")
        folder = os.open(path.name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    with _closing(folder):
        owner = os.fstat(folder).st_uid
        # The folder may have been replaced since `mkdir`, so its owner is changed only if it is empty and belongs to
        # root.
        if is_new and owner == 0 == os.geteuid() and not os.listdir(folder):
            os.fchown(folder, uid, gid)
        elif owner != uid:
            raise FolderRefused(f"{path} belongs to user {owner}, not {uid}; nothing was changed")
        os.fchmod(folder, 0o700)


def _root_link(folder: int, at: str, name: str) -> Path | None:
    """Return the target of a symbolic link; None if `name` is no link. Raises `FolderRefused` unless root owns link and
    folder.
    """
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISLNK(status.st_mode):
        return None
    owner = status.st_uid or os.fstat(folder).st_uid
    if owner != 0:
        raise FolderRefused(f"{at}/{name} is a symbolic link of user {owner}, which root does not follow")
    return Path(os.readlink(name, dir_fd=folder))


def _is_foreign(owner: os.stat_result) -> bool:
    """Whether this process runs as root and the owner is another user."""
    return os.geteuid() == 0 and owner.st_uid != 0


@contextlib.contextmanager
def _closing(descriptor: int) -> Generator[int, None, None]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


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


def write_private(path: Path, data: bytes, disk: Disk = SYSTEM_DISK) -> None:
    """Write a file atomically: readers see the old content or the new, even after a power cut. Raises `OSError`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write_private_in(folder, path.name, data, disk)
    finally:
        os.close(folder)


def write_private_in(folder: int, name: str, data: bytes, disk: Disk = SYSTEM_DISK) -> None:
    """Write a file atomically in an open folder. It does not matter if the folder's path is replaced meanwhile. Raises
    `OSError`.
    """
    new = f".{name.partition('.')[0]}-{secrets.token_hex(8)}"
    # The mode is set at creation, because any user could read the file between `open` and a later `chmod`.
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with ExitStack() as undo:
        undo.callback(_remove, new, folder)  # A partial file is removed, even after Ctrl-C.
        try:
            if os.geteuid() == 0:
                # Root may work in another user's home, where the folder's owner must be able to read the file.
                owner = os.fstat(folder)
                os.fchown(file, owner.st_uid, owner.st_gid)
            disk.write_all(file, data)
            disk.sync(file)
        finally:
            os.close(file)
        disk.replace(new, name, folder)
        undo.pop_all()
    # The folder is synced too, so that the rename survives a power cut.
    disk.sync(folder)


def _remove(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


class WriteOrder:
    """Gives each snapshot a number, so that a late thread never overwrites a newer snapshot. `content` names what is
    in the file, for the log.
    """

    def __init__(self, path: Path, disk: Disk = SYSTEM_DISK, content: str = "usage") -> None:
        self.path = path
        self._content = content
        self._disk = disk
        # The content of the newest write.
        self.written = b""
        self._is_failing = False
        self._taken = 0
        self._lock = threading.Lock()
        self._newest = 0

    def take(self) -> int:
        """Return the number of the next snapshot. Only the thread that counts may call it."""
        self._taken += 1
        return self._taken

    def write(self, number: int, data: bytes) -> None:
        """Replace the file's content, unless a newer snapshot is written or nothing has changed. Never raises
        `OSError`.
        """
        with self._lock:
            if number <= self._newest or data == self.written:
                return
            self._newest = number
            try:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_private(self.path, data, self._disk)
            except OSError as error:
                # A failure is logged once, not at each write; the counters stay in memory.
                if not self._is_failing:
                    log.warning("%s is not kept: %s: %s", self._content, self.path, error.strerror or error)
                self._is_failing = True
            else:
                self._is_failing = False
                self.written = data
