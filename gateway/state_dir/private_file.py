"""Files that only their owner may read, replaced as a whole or not at all."""

import os
import secrets
from contextlib import ExitStack, suppress
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Write a file atomically: readers see the old content or the new one, also after a power cut. Raises `OSError`."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        write_private_in(folder, path.name, data)
    finally:
        os.close(folder)


def write_private_in(folder: int, name: str, data: bytes) -> None:
    """The same in a folder that is open: a link that is put in its place meanwhile leads nowhere. Raises `OSError`."""
    new = f".{name.partition('.')[0]}-{secrets.token_hex(8)}"
    # Created private: between open and chmod any user could read it.
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
    with ExitStack() as undo:
        undo.callback(_remove, new, folder)  # no half of a file stays, whatever it was: ^C too
        with open(file, "wb") as out:
            if os.geteuid() == 0:
                # Root works in the homes of others, and whose folder it is must be able to read it.
                owner = os.fstat(folder)
                os.fchown(file, owner.st_uid, owner.st_gid)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, name, src_dir_fd=folder, dst_dir_fd=folder)
        undo.pop_all()
    # Makes the rename survive a power cut.
    os.fsync(folder)


def _remove(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)
