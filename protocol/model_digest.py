"""Digests of the content of a model's files, equal on every host; weights are sampled instead of read completely.

Digests depend on neither modification times nor paths. Workers find cached prefixes by digest, and gateways recognise a
model of another gateway by digest.
"""

import hashlib
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from protocol.weight_files import weight_files

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
