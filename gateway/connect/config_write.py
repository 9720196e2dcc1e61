"""Write of an edit to a client's file: its text before is kept beside it, and it is replaced as a whole."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from gateway.connect.config_edit import Edit, NotEditable
from gateway.failed import Failed


class Written(Struct, frozen=True):
    """One file. `backup` is empty where there was none before; nothing was written where it `is_unchanged`."""

    path: str
    backup: str
    is_unchanged: bool


def write(edit: Edit) -> Written:
    """Merge it into its file. Raises `Failed`, and then the file is as it was."""
    return rewrite(Path(edit.path), edit.merged)


def rewrite(file: Path, change: Callable[[str], str]) -> Written:
    """Put what `change` makes of its text into a file. Raises `Failed`, and then the file is as it was."""
    # The file itself and not a link to it, which may be of a folder of dot files.
    path = file.expanduser().resolve()
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        after = change(before)
        if after == before:
            return Written(str(path), "", True)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        backup = _keep(path, before) if path.exists() else ""
        _replace(path, after)
    except NotEditable as error:
        raise Failed(f"{path} was not changed: {error}") from None
    except OSError as error:
        raise Failed(f"{path} was not changed: {error.strerror or error}") from None
    return Written(str(path), backup, False)


def _keep(path: Path, text: str) -> str:
    """A copy with the time in its name, for the owner alone as keys may be in it."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    backup = path.with_name(f"{path.name}.before-mlxd-{stamp}")
    number = 1
    while backup.exists():
        number += 1
        backup = path.with_name(f"{path.name}.before-mlxd-{stamp}-{number}")
    with os.fdopen(os.open(backup, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)
    return str(backup)


def _replace(path: Path, text: str) -> None:
    """With the permissions that the file had; a new one is its owner's alone."""
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
        os.chmod(name, mode)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
