"""Stamp of a model's folder, which changes when one of its files is added, removed or written."""

from pathlib import Path

from gateway.model_files.metadata import Unreadable, find

# Name, size and modification time of each file of the folder and its subfolders. The target of a link counts; a link
# without a target does not.
Stamp = tuple[tuple[str, int, int], ...]


def folder_stamp(folder: Path) -> Stamp:
    """Return the stamp of a folder. Raises `OSError`."""
    parts = (folder, *(part for part in folder.iterdir() if part.is_dir() and not part.name.startswith(".")))
    files = sorted(file for part in parts for file in part.iterdir() if not file.name.startswith("."))
    stats = [(str(file.relative_to(folder)), file.stat()) for file in files if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def model_stamp(path: str) -> Stamp:
    """Return the stamp of a model's folder; empty if the model is not on this machine. Blocks while reading folders."""
    try:
        return folder_stamp(find(path))
    except (Unreadable, OSError):
        return ()
