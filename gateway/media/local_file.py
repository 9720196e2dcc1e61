"""Media in local files: `file:` URLs below configured folders."""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

FILE: Final = "file:"


class NotReadable(Exception):
    """The file is outside of the configured folders, or cannot be read."""


def read_file(url: str, folders: Sequence[str], limit_bytes: int) -> bytes:
    """Read a file up to one byte beyond `limit_bytes`. Links are followed before its folder is checked.

    Raises `NotReadable`.
    """
    try:
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost") or not folders:
            raise NotReadable
        path = Path(unquote(parts.path)).resolve(strict=True)
        if not any(path.is_relative_to(Path(folder).resolve()) for folder in folders):
            raise NotReadable
        # Opening a pipe would block until it has a writer, without O_NONBLOCK.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise NotReadable
            return file.read(limit_bytes + 1)
    except (OSError, ValueError, RuntimeError):
        raise NotReadable from None
