"""View of a model's folder for loaders of other libraries: a folder of links, with only the files that are meant.

These loaders find weight files with a pattern that contains the folder's path. They would merge files that the index
does not name, and a path with `[`, `*` or `?` would match another folder, or none.
"""

import json
import re
import tempfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from protocol.model_files import PATTERN, UnusableWeights, weight_files

ANY: Final = "*.safetensors"
CONFIG: Final = "config.json"
# Key of config.json that names a file of code for mlx-lm.
_CODE: Final = "model_file"
_PATTERN_SIGNS: Final = re.compile(r"[\[\]*?]")


@contextmanager
def checkpoint_view(folder: Path, changed: Mapping[str, Mapping[str, Any]]) -> Generator[Path]:
    """Yield a folder of links to the files of `folder`, with other content of some JSON files.

    It is deleted at the end; weights that were opened before can be read afterwards. Its path ends with that of
    `folder`, because some loaders read the model's name from it. Code of the model runs in `folder`. Raises
    `UnusableWeights`.
    """
    with tempfile.TemporaryDirectory(prefix="mlxd-model-") as place:
        view = Path(place, *(_PATTERN_SIGNS.sub("_", part) for part in folder.absolute().parts[1:]))
        view.mkdir(parents=True)
        _link(folder, view)
        for name, content in changed.items():
            (view / name).unlink(missing_ok=True)
            code = {_CODE: str(folder.absolute() / content[_CODE])} if isinstance(content.get(_CODE), str) else {}
            (view / name).write_text(json.dumps({**content, **code}), encoding="utf-8")
        yield view


def files_of(folder: Path) -> list[Path]:
    """Return the weight files of a folder in which they may have any name, such as a drafter's."""
    try:
        return weight_files(folder)
    except UnusableWeights:
        if any(folder.glob(PATTERN)):
            raise
        return weight_files(folder, ANY)


def _link(folder: Path, view: Path) -> None:
    weights = {file.name for file in files_of(folder)} if any(folder.glob(ANY)) else set[str]()
    for entry in folder.iterdir():
        if entry.name.startswith(".") or (entry.suffix == ".safetensors" and entry.name not in weights):
            continue
        link = view / entry.name
        if entry.is_dir() and any(entry.glob(ANY)):
            link.mkdir()
            _link(entry, link)
        else:
            link.symlink_to(entry.absolute())
