"""Form of a served model: a digest of everything that its answers depend on. Hosts with equal forms give
equal answers.

Stamp of a model's folder, which changes when one of its files is added, removed or written.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import protocol
from gateway.model_files.metadata import Unreadable, find
from protocol.checkpoint import ADDITIONAL_TEMPLATES
from protocol.model_files import PROCESSOR_FILES, TOKENIZER_FILES, digest, files_digest, weights_digest

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


_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")


class FormReader:
    """Computes the forms of models. A folder is read again only when the size or time of a file has changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[str, ...]], tuple[Stamp, str]] = {}

    def read(self, path: str, settings: Iterable[str]) -> str:
        """Return the form of the model at `path`; empty if the model is not on this machine. Blocks while reading
        files.

        `settings` are the configured settings that an answer depends on.
        """
        key = path, tuple(settings)
        try:
            folder = find(path)
            stamp = folder_stamp(folder)
            known = self._known.get(key)
            if known is not None and known[0] == stamp:
                return known[1]
            form = _form(folder, key[1])
        except (Unreadable, OSError, ValueError):
            return ""
        self._known[key] = stamp, form
        return form


def _form(folder: Path, settings: tuple[str, ...]) -> str:
    code = sorted(file.name for file in folder.glob("*.py"))
    additional = sorted(str(file.relative_to(folder)) for file in folder.glob(f"{ADDITIONAL_TEMPLATES}/*.jinja"))
    return digest(
        protocol.__version__,
        settings,
        weights_digest(folder),
        files_digest(folder, ("config.json", *PROCESSOR_FILES, *code)),
        files_digest(folder, (*TOKENIZER_FILES, *_TEMPLATES, *additional)),
    )
