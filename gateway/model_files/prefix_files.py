"""The prefix cache's folder on disk, measured, limited and emptied while workers may be using it.

The worker defines the layout (`worker/prefix_cache/disk.py`). Each folder `<key>` belongs to one form of a model and
contains `<edge>.safetensors` files and `.model`, which holds the model's path. Beside these folders are `quarantine/`
and `.total`, which holds the size of all files in bytes; locking it stops other processes from adding or removing
files.
"""

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path
from typing import Final

from msgspec import Struct

SUFFIX: Final = ".safetensors"
LABEL: Final = ".model"
LEDGER: Final = ".total"
QUARANTINE: Final = "quarantine"


class PrefixFolder(Struct, frozen=True):
    """The prefix files of one model. Another version of mlx, or of the weights, has another folder."""

    key: str
    # `model` is the path that the model was loaded from, or empty if it was not recorded.
    model: str
    files: int
    size_bytes: int
    used: float


class DeletedFiles(Struct, frozen=True):
    """Number and size of the deleted files."""

    files: int
    size_bytes: int


def measure(root: Path) -> list[PrefixFolder]:
    """Measure every folder that contains prefix files, and return the largest first."""
    folders = [_measure(folder) for folder in _folders(root)]
    return sorted((folder for folder in folders if folder.files), key=lambda folder: -folder.size_bytes)


def clear(root: Path, model: str | None = None) -> DeletedFiles:
    """Delete the files of the model with path `model`, or all files if it is None. Running workers tolerate this."""
    with _locked(root) as ledger:
        files = size_bytes = 0
        for folder in _folders(root):
            if model is not None and _label(folder) != model:
                continue
            for path in folder.glob(f"*{SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):
                    nbytes = path.stat().st_size
                    path.unlink()
                    files, size_bytes = files + 1, size_bytes + nbytes
        if ledger is not None:
            # The next writer counts the files if the ledger is empty.
            os.ftruncate(ledger, 0)
    return DeletedFiles(files, size_bytes)


def limit(root: Path, size_bytes: int) -> DeletedFiles:
    """Delete quarantined files, then the least recently used ones, until at most `size_bytes` are left.

    Workers enforce the limit only when they write, so that a lowered limit would leave what is there. Raises `OSError`.
    """
    with _locked(root) as ledger:
        found: list[tuple[bool, int, int, Path]] = []
        for path in (path for folder in _folders(root) for path in folder.glob(f"*{SUFFIX}")):
            with contextlib.suppress(FileNotFoundError):
                facts = path.stat()
                found.append((path.parent.name != QUARANTINE, facts.st_mtime_ns, facts.st_size, path))
        beyond, files, deleted = sum(size for _, _, size, _ in found) - size_bytes, 0, 0
        for _, _, size, path in sorted(found):
            if deleted >= beyond:
                break
            path.unlink(missing_ok=True)
            files, deleted = files + 1, deleted + size
        if files and ledger is not None:
            os.ftruncate(ledger, 0)
    return DeletedFiles(files, deleted)


@contextlib.contextmanager
def _locked(root: Path) -> Generator[int | None]:
    """Lock the cache's files against other processes. Yields the descriptor of `.total`, or None if there is no cache
    yet.
    """
    try:
        ledger = os.open(root / LEDGER, os.O_RDWR)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(ledger, fcntl.LOCK_EX)
        yield ledger
    finally:
        os.close(ledger)


def _folders(root: Path) -> list[Path]:
    return sorted(path for path in root.glob("*") if path.is_dir() and not path.is_symlink())


def _measure(folder: Path) -> PrefixFolder:
    files = size_bytes = 0
    used = 0.0
    for path in folder.glob(f"*{SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            facts = path.stat()
            files, size_bytes, used = files + 1, size_bytes + facts.st_size, max(used, facts.st_mtime)
    return PrefixFolder(folder.name, _label(folder), files, size_bytes, used)


def _label(folder: Path) -> str:
    try:
        return (folder / LABEL).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
