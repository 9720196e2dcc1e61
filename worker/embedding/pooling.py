"""Conversion of each row's hidden states to one vector: pooling, linear layers, normalization.

Steps from hidden states to a vector, and prompts, as in the files of sentence-transformers in a model's folder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn

from protocol.checkpoint import MODULES, file_json
from protocol.failures import Code
from worker.errors import LoadFailed, foreign_code
from worker.model.loader import read_json

# Poolings in the order in which sentence-transformers concatenates their vectors.
POOLINGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_QUERY: Final = ("query",)
_DOCUMENT: Final = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps after a transformer. The vectors of all `poolings` are concatenated, then pass through the linear layers in
    the folders `dense`, in order.

    `prompts` maps a name to the text before an input; `default_prompt` is the name for requests that name no prompt.
    """

    poolings: tuple[str, ...]
    dense: tuple[Path, ...] = ()
    is_normalized: bool = True
    # Folder of the transformer's weights, usually the model's own.
    weights: Path = Path()
    max_tokens: int = 0
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default_prompt: str = ""
    # Whether inputs are made lower case before they are encoded.
    is_lowercased: bool = False
    # Default number of dimensions to which vectors are truncated; 0 means no truncation.
    dimensions: int = 0

    def prompt(self, name: str, is_query: bool, is_document: bool) -> str | None:
        """Return the text before an input; None for a name that the model does not have."""
        if name:
            return self.prompts.get(name)
        wanted = (*(_QUERY if is_query else ()), *(_DOCUMENT if is_document else ()), self.default_prompt)
        return next((self.prompts[each] for each in wanted if each in self.prompts), "")


def read_steps(folder: Path, is_causal: bool) -> Steps:
    """Read the steps of a model. By default, a decoder pools its last token and an encoder the mean of its tokens, and
    the vector is normalized.

    Raises `LoadFailed` for an unknown step.
    """
    prompts, default, dimensions = _prompts(folder)
    steps = Steps(
        poolings=("lasttoken" if is_causal else "mean",),
        weights=folder,
        max_tokens=_max_tokens(folder),
        is_lowercased=_is_lowercased(folder),
        prompts=prompts,
        default_prompt=default,
        dimensions=dimensions,
    )
    if not (folder / MODULES).exists():
        return steps
    return _read_modules(folder, steps)


def _read_modules(folder: Path, steps: Steps) -> Steps:
    poolings, weights = steps.poolings, folder
    dense: list[Path] = []
    is_normalized = False
    for module in _modules(folder / MODULES):
        kind = str(module.get("type", "")).rpartition(".")[2]
        place = _inside(folder, str(module.get("path") or ""))
        match kind:
            case "Transformer":
                weights = place
            case "Pooling":
                poolings = _poolings(place / "config.json")
            case "Dense" if is_normalized:
                message = f"{folder / MODULES} has a step Dense behind Normalize, which is not supported"
                raise LoadFailed(Code.MODEL_UNSUPPORTED, message)
            case "Dense":
                dense.append(place)
            case "Normalize":
                is_normalized = True
            case _:
                raise LoadFailed(Code.MODEL_UNSUPPORTED, f"{folder / MODULES} has a step {kind!r}, which is not known")
    return replace(
        steps,
        poolings=poolings,
        dense=tuple(dense),
        is_normalized=is_normalized,
        weights=weights,
        max_tokens=steps.max_tokens or _max_tokens(weights),
        is_lowercased=steps.is_lowercased or _is_lowercased(weights),
    )


def _inside(folder: Path, path: str) -> Path:
    """Return the folder of a step. Raises `LoadFailed` if the folder is outside the model's.

    Only the name is checked: in the Hugging Face cache, the files of a snapshot are links to outside the snapshot's
    folder.
    """
    step = PurePosixPath(path)
    if step.is_absolute() or ".." in step.parts:
        message = f"{folder / MODULES} names the folder {path!r}, which is outside of the model's"
        raise LoadFailed(Code.MODEL_CORRUPT, message)
    return folder / step


def _modules(file: Path) -> list[dict[str, Any]]:
    try:
        content = file_json(file)
    except (OSError, ValueError) as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{file} is not readable JSON: {error}") from error
    if not isinstance(content, list) or not all(isinstance(each, dict) for each in content):
        raise LoadFailed(Code.MODEL_CORRUPT, f"{file} is not a list of steps")
    try:
        return sorted(content, key=lambda each: int(each.get("idx", 0)))
    except (TypeError, ValueError) as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{file} has a step whose idx is no number") from error


def _poolings(file: Path) -> tuple[str, ...]:
    config = read_json(file)
    if config.get("include_prompt", True) is False:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"{file} leaves prompts out of the pooling, which is not supported")
    named = config.get("pooling_mode")
    listed = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    poolings = tuple(listed) or tuple(way for key, way in POOLINGS.items() if config.get(key))
    unknown = [way for way in poolings if way not in POOLINGS.values()]
    if unknown or not poolings:
        raise LoadFailed(Code.MODEL_UNSUPPORTED, f"{file} names no way of pooling that is known: {unknown}")
    return poolings


def _prompts(folder: Path) -> tuple[dict[str, str], str, int]:
    file = folder / "config_sentence_transformers.json"
    config = read_json(file) if file.exists() else {}
    prompts = config.get("prompts")
    named = prompts if isinstance(prompts, dict) else {}
    default, dimensions = config.get("default_prompt_name"), config.get("truncate_dim")
    return (
        {str(name): text for name, text in named.items() if isinstance(text, str)},
        default if isinstance(default, str) else "",
        dimensions if isinstance(dimensions, int) and dimensions > 0 else 0,
    )


def _is_lowercased(folder: Path) -> bool:
    file = folder / "sentence_bert_config.json"
    return file.exists() and read_json(file).get("do_lower_case") is True


def _max_tokens(folder: Path) -> int:
    """Return the maximum length of an input according to `sentence_bert_config.json`; 0 if it has no limit."""
    file = folder / "sentence_bert_config.json"
    longest = read_json(file).get("max_seq_length") if file.exists() else None
    return longest if isinstance(longest, int) and longest > 0 else 0


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
