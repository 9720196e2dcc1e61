"""Conversion of each row's hidden states to one vector: pooling, linear layers, normalization."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from protocol.failures import Code
from worker.embedding.sentence_files import Steps
from worker.errors import LoadFailed, foreign_code
from worker.model.loader import read_json

_ACTIVATIONS: Final[dict[str, Callable[[mx.array], mx.array] | None]] = {
    "Identity": None,
    "Tanh": mx.tanh,
    "ReLU": nn.relu,
    "GELU": nn.gelu,
    "Sigmoid": mx.sigmoid,
}


def pooled(way: str, hidden: mx.array, lengths: mx.array) -> mx.array:
    """Pool `hidden` `[rows, longest, width]`, which is padded on the right; `lengths` are the lengths of its rows."""
    if way == "cls":
        return hidden[:, 0]
    if way == "lasttoken":
        return hidden[mx.arange(len(hidden)), lengths - 1]
    at = mx.arange(hidden.shape[1])
    is_token = (at[None] < lengths[:, None])[..., None]
    if way == "max":
        return mx.where(is_token, hidden, -mx.inf).max(axis=1)
    if way == "weightedmean":
        weights = mx.where(is_token, (at + 1)[None, :, None], 0)
        return (mx.where(is_token, hidden, 0) * weights).sum(axis=1) / weights.sum(axis=1)
    total = mx.where(is_token, hidden, 0).sum(axis=1)
    return total / (lengths if way == "mean" else mx.sqrt(lengths))[:, None]


class PoolingHead:
    """Steps after a transformer, computed in float32 regardless of the transformer's dtype."""

    def __init__(self, steps: Steps) -> None:
        """Load the layers. Raises `LoadFailed`."""
        self._steps = steps
        self._dense = [_load_dense(folder) for folder in steps.dense]

    def __call__(self, hidden: mx.array, lengths: Sequence[int]) -> mx.array:
        counts = mx.array(list(lengths))
        hidden = hidden.astype(mx.float32)
        vectors = mx.concatenate([pooled(way, hidden, counts) for way in self._steps.poolings], axis=-1)
        for weight, bias, activation in self._dense:
            vectors = vectors @ weight.T if bias is None else vectors @ weight.T + bias
            vectors = vectors if activation is None else activation(vectors)
        if not self._steps.is_normalized:
            return vectors
        # A zero vector becomes NaN, which the loop detects.
        return vectors / mx.linalg.norm(vectors, axis=-1, keepdims=True)

    def width(self, hidden_width: int) -> int:
        """Return the length of a vector. Raises `LoadFailed` for a layer that takes vectors of another length."""
        width = hidden_width * len(self._steps.poolings)
        for folder, (weight, _, _) in zip(self._steps.dense, self._dense, strict=True):
            if hidden_width and weight.shape[1:] != (width,):
                message = f"{folder} takes vectors of {weight.shape[-1]} numbers, and gets {width}"
                raise LoadFailed(Code.MODEL_CORRUPT, message)
            width = int(weight.shape[0])
        return width


def _load_dense(folder: Path) -> tuple[mx.array, mx.array | None, Callable[[mx.array], mx.array] | None]:
    config = read_json(folder / "config.json")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"{folder} has the activation {name!r}, which is not known")
    file = folder / "model.safetensors"
    if not file.exists():
        raise LoadFailed(Code.MODEL_MISSING, f"{folder} holds no model.safetensors")
    with foreign_code(lambda error: LoadFailed(Code.MODEL_CORRUPT, f"{file} cannot be read: {error}")):
        weights: Any = mx.load(str(file))
    try:
        weight, bias = weights["linear.weight"], weights.get("linear.bias")
    except KeyError as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{file} lacks linear.weight") from error
    return weight.astype(mx.float32), None if bias is None else bias.astype(mx.float32), _ACTIVATIONS[name]
