"""Index of the experts in a repacked folder on disk, for workers that read the experts and for memory estimates.

A repacked folder is a model's folder whose `model*.safetensors` hold everything except the experts.
`experts/index.json` describes the experts' files: one file per layer, in which expert i takes `record_bytes` from
offset `i * record_bytes`.
"""

import math
from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = "experts"
INDEX: Final = "index.json"
VERSION: Final = 1
# Maximum number of running sequences: a larger batch needs most experts of each layer in every step.
RUNNING_MAX: Final = 2
# The cache holds a quarter of all experts by default.
USUAL_CACHE_DIVISOR: Final = 4
# Bytes per value of each dtype.
WIDTHS: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "uint8": 1}
_INDEX_BYTES_MAX: Final = 64 * 1024 * 1024


class ExpertTensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tensor of an expert: an array of its layer's projection, under MLX's name, and its place in the record."""

    projection: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    bytes: int


class ExpertLayer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Experts of one layer. `path` is the path of the layer's module in the model."""

    path: str
    file: str
    experts: int
    record_bytes: int
    tensors: tuple[ExpertTensor, ...]
    # Group size, bits and mode of quantized weights, by projection.
    quantization: dict[str, tuple[int, int, str]] = {}


class ExpertIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Index of all experts of a model. `chosen` is the number of experts per layer that a token uses."""

    version: int
    chosen: int
    layers: tuple[ExpertLayer, ...]

    @property
    def total_bytes(self) -> int:
        return sum(layer.experts * layer.record_bytes for layer in self.layers)

    def slots(self, layer: ExpertLayer, wanted: int) -> int:
        """Return how many experts of a layer fit into a cache of `wanted` bytes; a negative `wanted` means the default
        size.

        The same share of every layer's experts fits, but at least as many experts as one token uses.
        """
        share = (
            layer.experts // USUAL_CACHE_DIVISOR if wanted < 0 else wanted * layer.experts // max(1, self.total_bytes)
        )
        return min(layer.experts, max(self.chosen, share))

    def cache_bytes(self, wanted: int) -> int:
        """Return the size in bytes of the cache that results from a requested size of `wanted` bytes."""
        return sum(self.slots(layer, wanted) * layer.record_bytes for layer in self.layers)


def has_index(folder: Path) -> bool:
    """Whether a folder was repacked."""
    return (folder / FOLDER / INDEX).is_file()


def read_index(folder: Path) -> ExpertIndex:
    """Read the index of a repacked folder, and check it against the lengths of its files. Raises `ValueError`."""
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
