"""Records of experts: conversion between the arrays of one expert and bytes."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np

from protocol.experts import ExpertLayer, ExpertTensor

# NumPy has no bfloat16, so the bytes of bfloat16 arrays are handled as integers of the same width.
_DTYPES: Final[dict[str, tuple[Any, Any]]] = {
    "float32": (np.float32, mx.float32),
    "float16": (np.float16, mx.float16),
    "bfloat16": (np.uint16, mx.bfloat16),
    "uint32": (np.uint32, mx.uint32),
    "uint8": (np.uint8, mx.uint8),
}
# Number of threads that read experts from the disk.
READ_THREADS: Final = 4


def name_of(dtype: mx.Dtype) -> str | None:
    """Return the index's name of a dtype; None if the index has no name for it."""
    return next((name for name, (_, own) in _DTYPES.items() if own == dtype), None)


def to_bytes(array: mx.array) -> bytes:
    """Return an array's elements as bytes, little-endian, in row order."""
    kept, _ = _DTYPES[str(name_of(array.dtype))]
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array).astype(kept, copy=False).tobytes()


class Records:
    """File of one layer, which stays open until the process ends. Several threads may read it."""

    def __init__(self, folder: Path, layer: ExpertLayer, readers: ThreadPoolExecutor) -> None:
        self._file = os.open(folder / layer.file, os.O_RDONLY)
        self._layer = layer
        self._readers = readers

    def read(self, experts: Sequence[int]) -> list[list[mx.array]]:
        """Read the arrays of each expert, in the order of the layer's tensors. Raises `OSError`."""
        tensors = self._layer.tensors
        return [[_array(record, tensor) for tensor in tensors] for record in self._readers.map(self._record, experts)]

    def _record(self, expert: int) -> bytearray:
        size = self._layer.record_bytes
        record = bytearray(size)
        view, done = memoryview(record), 0
        while done < size:
            count = os.preadv(self._file, [view[done:]], expert * size + done)
            if count == 0:
                raise OSError(f"{self._layer.file} ended in expert {expert}")
            done += count
        return record


def _array(record: bytearray, tensor: ExpertTensor) -> mx.array:
    kept, own = _DTYPES[tensor.dtype]
    flat = np.frombuffer(record, kept, count=tensor.bytes // np.dtype(kept).itemsize, offset=tensor.offset)
    array = mx.array(flat.reshape(tensor.shape))
    return array.view(own) if own == mx.bfloat16 else array
