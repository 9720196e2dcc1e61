"""Tensors within the bytes of a safetensors file (github.com/huggingface/safetensors), checked against its bounds."""

import json
import math
import struct
from dataclasses import dataclass
from typing import Final

# Bytes per element of the dtypes that an adapter may have.
WIDTHS: Final = {"F32": 4, "F16": 2, "BF16": 2}
_HEADER_BYTES_MAX: Final = 64 << 20
_LFS_POINTER: Final = b"version https://git-lfs"


class UnusableAdapter(Exception):
    """Raised with the operator's reason if an adapter cannot be served."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Tensor in a file: its elements are the bytes from `begin` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(data: bytes) -> dict[str, StoredTensor]:
    """Return the tensors of a file by name. Each tensor is checked to lie within the file. Raises `UnusableAdapter`."""
    if data.startswith(_LFS_POINTER):
        raise UnusableAdapter("its file is a git-lfs pointer, not the weights; run: git lfs pull")
    length = struct.unpack_from("<Q", data)[0] if len(data) >= 8 else 0
    if not 2 <= length <= min(_HEADER_BYTES_MAX, len(data) - 8):
        raise UnusableAdapter("its file is truncated or not a safetensors file")
    try:
        header = json.loads(data[8 : 8 + length])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _tensor(name, entry, 8 + length, len(data)) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableAdapter("its file has a broken safetensors header") from error


def _tensor(name: str, entry: dict[str, object], start: int, size: int) -> StoredTensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WIDTHS:
        raise UnusableAdapter(f"{name[:200]} has numbers of type {dtype!r}; {', '.join(WIDTHS)} are served")
    sizes, places = _numbers(shape), _numbers(offsets)
    begin, end = places
    if end - begin != WIDTHS[dtype] * math.prod(sizes) or start + end > size:
        raise ValueError(name)
    return StoredTensor(dtype, sizes, start + begin, start + end)


def _numbers(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        raise ValueError
    return tuple(value)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
