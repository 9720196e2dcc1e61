"""Atomic write of an edit to a client's configuration file, with a backup of the old text."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec import Struct

from gateway.client_setup.config_edit import ConfigEdit, NotEditable
from gateway.failed import CommandFailed

_OWNERS: Final = 0o700


class WrittenFile(Struct, frozen=True):
    """Result of a write. `backup` is empty if the file is new; `is_unchanged` means that nothing was written."""

    path: str
    backup: str
    is_unchanged: bool


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
        if after == before:
            if is_private and kept is not None:
                path.chmod(path.stat().st_mode & _OWNERS)
            return WrittenFile(str(path), "", True)
        data = after.encode()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        backup = "" if kept is None else _keep(path, kept)
        _replace(path, data, _OWNERS if is_private else 0o777)
    except NotEditable as error:
        raise CommandFailed(f"{path} was not changed: {error}") from None
    except UnicodeError as error:
        raise CommandFailed(f"{path} was not changed: it is no UTF-8 text ({error})") from None
    except OSError as error:
        raise CommandFailed(f"{path} was not changed: {error.strerror or error}") from None
    return WrittenFile(str(path), backup, False)


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


def _replace(path: Path, data: bytes, mask: int) -> None:
    """Write a file. Its new permissions are its old ones, limited by `mask`; a new file is private to its owner."""
    mode = path.stat().st_mode & mask if path.exists() else 0o600
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data)
        os.chmod(name, mode)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
