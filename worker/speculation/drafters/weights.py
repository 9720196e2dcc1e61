"""Weights of drafters once they are loaded."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def settle(module: Any, dtype: mx.Dtype) -> int:
    """Evaluate the weights of a module, in float32 where the target's are; returns their bytes."""
    if dtype == mx.float32:
        module.apply(_to_float32)
    mx.eval(module.parameters())
    return size_bytes(module.parameters())


def _to_float32(array: mx.array) -> mx.array:
    return array.astype(mx.float32) if mx.issubdtype(array.dtype, mx.floating) else array


def size_bytes(parameters: Any) -> int:
    flat: Any = tree_flatten(parameters)
    return sum(int(array.nbytes) for _, array in flat)
