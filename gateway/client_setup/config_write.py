"""Atomic write of an edit to a client's configuration file, with a backup of the old text, and its undoing."""

import hashlib
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.client_setup.config_edit import ConfigEdit, NotEditable
from gateway.failed import CommandFailed

_OWNERS: Final = 0o700


class WrittenFile(Struct, frozen=True):
    """Result of a write. `backup` is empty if the file is new; `is_unchanged` means that nothing was written.

    The other fields are what `undo` needs: the file's permissions before, a digest of what was written, and the folders
    that were made for it, the innermost first.
    """

    path: str
    backup: str
    is_unchanged: bool
    mode: int = 0
    digest: str = ""
    folders: tuple[str, ...] = ()


class ChangedSince(Exception):
    """A file is not restored, because it is not what mlxd has written; the message tells its owner what it was."""


def write(edit: ConfigEdit) -> WrittenFile:
    """Merge an edit into its file. If this fails, raises `CommandFailed`, and the file stays as it was."""
    return rewrite(Path(edit.path), edit.merged, is_private=edit.has_key)


def rewrite(file: Path, change: Callable[[str], str], *, is_private: bool = False) -> WrittenFile:
    """Replace a file's text by what `change` returns for it; `is_private` removes other users' permissions.

    If this fails, raises `CommandFailed`, and the file stays as it was.
    """
    # A symbolic link is followed, because it may point into a folder of dot files, and only its target is replaced.
    path = file.expanduser().resolve()
    try:
        kept = path.read_bytes() if path.exists() else None
        # A carriage return alone does not end a line.
        before = (kept or b"").decode().replace("\r\n", "\n")
        after = change(before)
        mode = 0 if kept is None else stat.S_IMODE(path.stat().st_mode)
        if after == before:
            if is_private and kept is not None:
                path.chmod(mode & _OWNERS)
                _check_private(path)
            return WrittenFile(str(path), "", True)
        data = after.encode()
        folders = _make_folders(path.parent)
        backup = "" if kept is None else _keep(path, kept)
        _replace(path, data, 0o600 if kept is None else mode & (_OWNERS if is_private else 0o777), is_private)
    except NotEditable as error:
        raise CommandFailed(f"{path} was not changed: {error}") from None
    except UnicodeError as error:
        raise CommandFailed(f"{path} was not changed: it is no UTF-8 text ({error})") from None
    except OSError as error:
        raise CommandFailed(f"{path} was not changed: {error.strerror or error}") from None
    return WrittenFile(str(path), backup, False, mode, _digest(data), folders)


def undo(written: WrittenFile) -> None:
    """Make a file what it was before a write, or remove it if it was new. Raises `ChangedSince` if it has been changed
    after the write, `CommandFailed` if it cannot be restored.
    """
    path, backup = Path(written.path), Path(written.backup)
    try:
        if not path.exists() and not written.backup:
            return
        kept = f"; what it was before is in {backup}" if written.backup else "; it was made by mlxctl connect"
        if not path.exists() or _digest(path.read_bytes()) != written.digest:
            raise ChangedSince(f"{path} was changed after mlxctl connect had written it, and stays as it is{kept}")
        if written.backup:
            _replace(path, backup.read_bytes(), written.mode)
            backup.unlink()
        else:
            path.unlink()
            for folder in written.folders:
                with suppress(OSError):  # It may hold other files now.
                    os.rmdir(folder)
    except OSError as error:
        raise CommandFailed(f"{path} was not restored: {error.strerror or error}") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _make_folders(folder: Path) -> tuple[str, ...]:
    """Make a folder and those above it; return those that were missing, the innermost first."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tuple(map(str, missing))


def _keep(path: Path, data: bytes) -> str:
    """Back up the old text in a file with the time in its name. Only its owner may read it, because the text may
    include keys.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    backup = path.with_name(f"{path.name}.before-mlxd-{stamp}")
    number = 1
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.before-mlxd-{stamp}-{number}")
    with os.fdopen(os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(data)
    return str(backup)


def _replace(path: Path, data: bytes, mode: int, is_private: bool = False) -> None:
    """Write a file with these permissions; nobody can read it before it has them."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
        os.chmod(name, mode)
        if is_private:
            _check_private(Path(name))
        os.replace(name, path)
    except (OSError, NotEditable):
        os.unlink(name)
        raise


def _check_private(path: Path) -> None:
    """Check that only its owner may read a file with a key: some file systems keep no permissions. Raises
    `NotEditable`.
    """
    if path.stat().st_mode & 0o077:
        raise NotEditable("a key would be in it, and its file system lets other users read it")
