"""Files that hold a model's weights: the gateway measures them, digests name them, and workers load only them.

An index names the files. Without an index all `model*.safetensors` are parts of one model, so a tensor in two of them
(a copy that Finder made, an older version) leaves open which one is meant.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from protocol.checkpoint import file_json

PATTERN: Final = "model*.safetensors"
INDEX: Final = "model.safetensors.index.json"
# Copies of the weights in another format beside `model.safetensors`, under the names that transformers gives them.
_VARIANT: Final = re.compile(r"model\.(?:fp|bf|int)\d+(?:-\d+-of-\d+)?\.safetensors")
_SINGLE: Final = "model.safetensors"


class UnusableWeights(ValueError):
    """Raised for weight files that cannot be a model; `is_missing` is set if a file is not there."""

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


def weight_files(folder: Path, pattern: str = PATTERN) -> list[Path]:
    """Return the weight files of a folder, sorted by name. Raises `UnusableWeights`.

    Links into the Hugging Face cache may be broken, and count as missing, as folders and FIFOs do.
    """
    there = {file.name: file for file in sorted(folder.glob(pattern)) if file.is_file() and file.name[0] != "."}
    if not there:
        raise UnusableWeights(f"{folder} holds no {pattern} file", is_missing=True)
    index = folder / INDEX
    if index.is_symlink() and not index.exists():
        raise UnusableWeights(f"{folder} lacks {INDEX}: its link is broken", is_missing=True)
    if index.exists():
        named = set(_weight_map(index).values())
        if missing := sorted(named - there.keys()):
            text = f"{folder} lacks {len(missing)} weight file(s), such as {missing[0]}"
            raise UnusableWeights(text, is_missing=True)
        return [file for name, file in there.items() if name in named]
    if _SINGLE in there:
        return [file for name, file in there.items() if not _VARIANT.fullmatch(name)]
    return list(there.values())


def check_tensors(folder: Path, tensors: Mapping[str, Collection[str]]) -> None:
    """Check the names of the tensors in each weight file against the index and each other. Raises `UnusableWeights`."""
    holders: dict[str, str] = {}
    for file, names in tensors.items():
        for name in names:
            if (other := holders.setdefault(name, file)) != file:
                raise UnusableWeights(f"{folder} holds the tensor {name} twice, in {other} and in {file}: remove one")
    index = folder / INDEX
    if not index.exists():
        return
    if lost := sorted(name for name, file in _weight_map(index).items() if holders.get(name) != file):
        name, file = lost[0], _weight_map(index)[lost[0]]
        text = f"{folder} lacks {len(lost)} tensor(s) that {INDEX} names, such as {name} in {file}"
        raise UnusableWeights(text)


def _weight_map(index: Path) -> dict[str, str]:
    """Return the file of each tensor as an index states it."""
    try:
        content: Any = file_json(index)
    except (OSError, ValueError) as error:
        raise UnusableWeights(f"{index} is not readable JSON: {error}") from None
    match content:
        case {"weight_map": {**weight_map}} if weight_map and all(
            isinstance(file, str) for file in weight_map.values()
        ):
            return weight_map
        case _:
            raise UnusableWeights(f"{index} names no weight files")
