"""Conversion of an adapter's tensors to the matrices of its updates, in the dtype of the model."""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from worker.model.lora.adapter_files import Update
from worker.model.lora.slots import Matrices
from worker.model.lora.tensors import StoredTensor, UnusableAdapter

_TYPES: Final[dict[str, Any]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


def matrices(update: Update, data: bytes, linear: Any, dtype: Any) -> Matrices:
    """Return the evaluated update of a layer whose output has `dtype`. Raises `UnusableAdapter` if it is not finite."""
    a, b = _array(update.a, data), _array(update.b, data)
    if update.is_transposed:
        a, b = a.T, b.T
    b = b * update.scale
    gain: mx.array | None = None
    if update.magnitude is not None:
        adapted = _weight(linear) + b.T @ a.T
        gain = _array(update.magnitude, data) / mx.linalg.norm(adapted, axis=1)
        b = b * gain
    result = Matrices(
        mx.contiguous(a.astype(dtype)), mx.contiguous(b.astype(dtype)), None if gain is None else gain.astype(dtype)
    )
    if not all(bool(mx.all(mx.isfinite(array)).item()) for array in result.arrays):
        name = str(dtype).rpartition(".")[2]
        raise UnusableAdapter(f"{update.place.path}: its numbers are not finite in the model's arithmetic ({name})")
    return result


def dtype_of(model: Any, linear: Any) -> Any:
    """Return the dtype of a layer's output; a model's activations have the dtype of its norms."""
    own = (linear.get(name) for name in ("bias", "biases", "scales", "weight"))
    floating = (array.dtype for array in own if array is not None and mx.issubdtype(array.dtype, mx.floating))
    norms = (module for module in model.modules() if isinstance(module, nn.RMSNorm | nn.LayerNorm))
    return next(floating, None) or next((norm.weight.dtype for norm in norms if "weight" in norm), mx.float32)


def _array(tensor: StoredTensor, data: bytes) -> mx.array:
    """Return a tensor in float32."""
    kind = np.dtype(_TYPES[tensor.dtype])
    count = (tensor.end - tensor.begin) // kind.itemsize
    numbers = np.frombuffer(data, dtype=kind, count=count, offset=tensor.begin).reshape(tensor.shape)
    array = mx.array(numbers)
    return (array.view(mx.bfloat16) if tensor.dtype == "BF16" else array).astype(mx.float32)


def _weight(linear: Any) -> mx.array:
    """Return the weight `[outputs, inputs]` in float32."""
    weight: mx.array = linear.weight
    if isinstance(linear, nn.QuantizedLinear):
        weight = mx.dequantize(
            weight,
            linear.scales,
            linear.get("biases"),
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
        )
    return weight.astype(mx.float32)
