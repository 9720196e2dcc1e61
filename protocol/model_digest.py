"""Digests of a model's files by their content, equal on every host: of its weights without reading all of them.

Neither times nor paths count. Workers find cached prefixes by these digests, gateways models of each other.
"""

import hashlib
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "merges.txt")
# What becomes of the pixels of media, beside the tower's weights.
PROCESSOR_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")

# A file in the Hugging Face cache is a link to a blob that is named by its SHA-256.
_BLOB: Final = re.compile(r"[0-9a-f]{64}")
# Of other files so much is read: blocks spread over each, and one in the middle of each tensor.
_BLOCKS: Final = 64
_BLOCK_BYTES: Final = 64 << 10
_TENSOR_BYTES: Final = 4 << 10


def digest(*parts: object) -> str:
    """The digest of some values, by how they are written."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=20).hexdigest()


def files_digest(folder: Path, names: Iterable[str]) -> str:
    """The digest of small files, read whole; one that is missing counts as such. Raises `OSError`."""
    files = [(name, folder / name) for name in names]
    return digest(*((name, digest(file.read_bytes()) if file.exists() else None) for name, file in files))


def weights_digest(folder: Path) -> str:
    """The digest of a model's weights. Raises `OSError`, and `ValueError` for files that are not safetensors."""
    return digest(*((file.name, _content(file)) for file in sorted(folder.glob("model*.safetensors"))))


class _Tensor(msgspec.Struct, frozen=True):
    data_offsets: tuple[int, int]


def _content(file: Path) -> str:
    """The SHA-256 of a blob, from its name; else a digest of size, header and samples. Two models of one architecture
    have all but the samples in common, and what training changes of a tensor it changes everywhere in it."""
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


def _tensors(header: bytes) -> list[_Tensor]:
    table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    return [msgspec.json.decode(raw, type=_Tensor) for name, raw in table.items() if name != "__metadata__"]
