"""Files that only their owner may read, replaced as a whole or not at all."""

import os
import secrets
from pathlib import Path


def write_private(path: Path, data: bytes) -> None:
    """Whoever reads sees the old content or the new one, also after a power cut. Raises `OSError`."""
    folder = path.parent
    new = folder / f".{path.stem}-{secrets.token_hex(8)}"
    # Born private: between open and chmod anybody could read it.
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as out:
            if os.geteuid() == 0:
                # Root works in the homes of others, and whose folder it is must be able to read it.
                os.fchown(file, folder.stat().st_uid, folder.stat().st_gid)
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        new.replace(path)
    except BaseException:  # Whatever it was, ^C too, and it goes on: no half of a file stays.
        new.unlink(missing_ok=True)
        raise
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
