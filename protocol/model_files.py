"""Files of a model: its weights, their digests, and the index of experts on disk.

Files that hold a model's weights: the gateway measures them, digests name them, and workers load only them.

An index names the files. Without an index all `model*.safetensors` are parts of one model, so a tensor in two of them
(a copy that Finder made, an older version) leaves open which one is meant.

Digests of the content of a model's files, equal on every host; weights are sampled instead of read completely.

Digests depend on neither modification times nor paths. Workers find cached prefixes by digest, and gateways recognise a
model of another gateway by digest.

Index of the experts in a repacked folder on disk, for workers that read the experts and for memory estimates.

A repacked folder is a model's folder whose `model*.safetensors` hold everything except the experts.
`experts/index.json` describes the experts' files: one file per layer, in which expert i takes `record_bytes` from
offset `i * record_bytes`.
"""

import hashlib
import math
import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

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


TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
# Files that determine the preprocessing of media, in addition to the tower's weights.
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

# Files in the Hugging Face cache are links to blobs that are named by their SHA-256.
_BLOB: Final = re.compile(r"[0-9a-f]{64}")
# Number of blocks, spread over a file, by which a file without a SHA-256 in its name is sampled. In addition, a block
# from the middle of each tensor is read.
_BLOCKS: Final = 64
_BLOCK_BYTES: Final = 64 << 10
_TENSOR_BYTES: Final = 4 << 10


def digest(*parts: object) -> str:
    """Return the digest of the values' `repr`."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


def files_digest(folder: Path, names: Iterable[str]) -> str:
    """Return the digest of small files, which are read completely; a missing one counts as None. Raises `OSError`."""
    files = [(name, folder / name) for name in names]
    return digest(*((name, digest(file.read_bytes()) if file.exists() else None) for name, file in files))


def weights_digest(folder: Path) -> str:
    """Return the digest of a model's weights. Raises `OSError`, and `ValueError` for files that are not safetensors."""
    return digest(*((file.name, _content(file)) for file in weight_files(folder)))


class _TensorSpan(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


def _content(file: Path) -> str:
    """Return a blob's SHA-256 from its name, or else a digest of size, header and samples.

    Samples suffice to distinguish two models of one architecture: training changes a tensor everywhere.
    """
    blob = file.resolve()
    if blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name):
        return blob.name
    with file.open("rb", buffering=0) as stream:
        descriptor = stream.fileno()
        size = os.fstat(descriptor).st_size
        header = _header(descriptor, size)
        content = hashlib.blake2b(b"%d " % size + header, digest_size=32)
        begin = 8 + len(header)
        for at in range(_BLOCKS):
            content.update(os.pread(descriptor, _BLOCK_BYTES, begin + (size - begin) * at // _BLOCKS))
        for tensor in _tensors(header):
            middle = begin + sum(tensor.data_offsets) // 2
            content.update(os.pread(descriptor, _TENSOR_BYTES, middle))
    return content.hexdigest()


def _header(descriptor: int, size: int) -> bytes:
    first = os.pread(descriptor, 8, 0)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
    if 8 + length > size:
        raise ValueError("a truncated safetensors file")
    return os.pread(descriptor, length, 8)


def _tensors(header: bytes) -> list[_TensorSpan]:
    table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    return [msgspec.json.decode(raw, type=_TensorSpan) for name, raw in table.items() if name != "__metadata__"]


FOLDER: Final = "experts"
EXPERTS_INDEX: Final = "index.json"
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

    def cache_bytes(self, wanted: int = -1) -> int:
        """Return the size in bytes of the cache that results from a requested size of `wanted` bytes; -1 means the
        default.
        """
        return sum(self.slots(layer, wanted) * layer.record_bytes for layer in self.layers)


def has_index(folder: Path) -> bool:
    """Whether a folder was repacked."""
    return (folder / FOLDER / EXPERTS_INDEX).is_file()


def read_index(folder: Path) -> ExpertIndex:
    """Read the index of a repacked folder, and check it against the lengths of its files. Raises `ValueError`."""
    file = folder / FOLDER / EXPERTS_INDEX
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
