"""Experts on disk: the index of a repacked folder, for the worker that reads them and for those that count its memory.

A repacked folder is a model's folder whose `model*.safetensors` hold all but the experts. `experts/index.json` says
where those are: a file for each layer, in which expert i is the `record_bytes` from `i * record_bytes` on.
"""

import math
from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = "experts"
INDEX: Final = "index.json"
VERSION: Final = 1
# Sequences that may run at once: the rows of a larger batch together need most experts of each layer.
RUNNING_MAX: Final = 2
# Part of all experts that is kept in memory where the configuration does not say.
USUAL_PART: Final = 4
# Bytes of a number of each type.
WIDTHS: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "uint8": 1}
_INDEX_BYTES_MAX: Final = 64 * 1024 * 1024


class ExpertTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of an expert: an array of its layer's projection, in MLX's names, and its place in the record."""

    projection: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class ExpertLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The experts of one layer. `path` is the module's; `chosen` are the experts of one token."""

    path: str
    file: str
    experts: int
    record_bytes: int
    tensors: tuple[ExpertTensor, ...]
    # By projection: group size and bits of quantized weights, and their mode.
    quantization: dict[str, tuple[int, int, str]] = {}


class ExpertIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All experts of a model. `chosen` is how many of a layer a token uses."""

    version: int
    chosen: int
    layers: tuple[ExpertLayer, ...]

    @property
    def total_bytes(self) -> int:
        return sum(layer.experts * layer.record_bytes for layer in self.layers)

    def slots(self, layer: ExpertLayer, wanted: int) -> int:
        """Experts of a layer in a cache of so many bytes, below 0 the usual: each layer has the same part of them, and
        at least those of one token."""
        share = layer.experts // USUAL_PART if wanted < 0 else wanted * layer.experts // max(1, self.total_bytes)
        return min(layer.experts, max(self.chosen, share))

    def cache_bytes(self, wanted: int) -> int:
        """Bytes of a cache that is to have so many."""
        return sum(self.slots(layer, wanted) * layer.record_bytes for layer in self.layers)


def has_index(folder: Path) -> bool:
    """Whether a folder was repacked."""
    return (folder / FOLDER / INDEX).is_file()


def read_index(folder: Path) -> ExpertIndex:
    """The index of a repacked folder, checked against the lengths of its files. Raises `ValueError`."""
    file = folder / FOLDER / INDEX
    try:
        if file.stat().st_size > _INDEX_BYTES_MAX:
            raise ValueError(f"{file} is larger than any index")
        index = msgspec.json.decode(file.read_bytes(), type=ExpertIndex)
        _check(folder, index)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    return index


def _check(folder: Path, index: ExpertIndex) -> None:
    if index.version != VERSION:
        raise ValueError(f"{folder} was repacked by another version of mlxd: repack the model again")
    if not index.layers or index.chosen < 1:
        raise ValueError(f"the index of {folder} names no experts")
    for layer in index.layers:
        if Path(layer.file).name != layer.file or layer.experts < 1 or layer.record_bytes < 1:
            raise ValueError(f"the index of {folder} names no possible file for {layer.path}")
        ends = [tensor.offset + tensor.bytes for tensor in layer.tensors]
        if not ends or max(ends) > layer.record_bytes or min(tensor.offset for tensor in layer.tensors) < 0:
            raise ValueError(f"the index of {folder} names tensors outside of the records of {layer.path}")
        for tensor in layer.tensors:
            width = WIDTHS.get(tensor.dtype, 0)
            if min(tensor.shape, default=1) < 1 or tensor.bytes != width * math.prod(tensor.shape):
                raise ValueError(f"the index of {folder} names no possible array for {layer.path}.{tensor.projection}")
        size = (folder / FOLDER / layer.file).stat().st_size
        if size != layer.experts * layer.record_bytes:
            raise ValueError(
                f"{folder / FOLDER / layer.file} has {size} bytes instead of {layer.experts * layer.record_bytes}"
            )
