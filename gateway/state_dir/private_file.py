"""Atomic writes of files that only their owner may read."""

import os
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path

from gateway.disk import SYSTEM_DISK, Disk


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
