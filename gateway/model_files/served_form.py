"""Form of a served model: one digest of all that an answer depends on, equal on hosts that serve the same model."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import protocol
from gateway.model_files.metadata import Unreadable, find
from protocol.model_digest import PROCESSOR_FILES, TOKENIZER_FILES, digest, files_digest, weights_digest

_TEMPLATES: Final = ("chat_template.jinja", "chat_template.json")

# Name, size and time of each file of a folder: what tells that it must be read again.
_Stamp = tuple[tuple[str, int, int], ...]


class FormReader:
    """Reader of forms. The files of a folder are read again when a size or a time has changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[str, ...]], tuple[_Stamp, str]] = {}

    def read(self, path: str, settings: Iterable[str]) -> str:
        """The form of the model at `path`; empty for one that is not on this machine. Not for the event loop.

        `settings` are those of the configuration on which an answer depends.
        """
        key = path, tuple(settings)
        try:
            folder = find(path)
            stamp = _stamp(folder)
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
    return digest(
        protocol.__version__,
        settings,
        weights_digest(folder),
        files_digest(folder, ("config.json", *PROCESSOR_FILES, *code)),
        files_digest(folder, (*TOKENIZER_FILES, *_TEMPLATES)),
    )


def _stamp(folder: Path) -> _Stamp:
    facts = [(file.name, file.stat()) for file in sorted(folder.iterdir()) if file.is_file()]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in facts)
