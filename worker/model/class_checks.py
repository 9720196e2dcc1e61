"""Checks of what a class of mlx-lm makes of a model's files: types of numbers, heads of their own, activations and
windows.
"""

import json
import logging
import struct
import sys
from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchLinear

from protocol.failures import Code
from protocol.weight_files import weight_files
from worker.errors import LoadFailed

log = logging.getLogger("mlxd.worker")

# Modules that compute with their weights as numbers. MLX loads floats of 8 bits as integers, whose scales only modules
# of other types apply.
_OF_FLOATS: Final = (nn.Linear, nn.Embedding, nn.RMSNorm, nn.LayerNorm, SwitchLinear)
# Names of the activation of `swiglu`, with which most classes compute whatever `hidden_act` says.
_SILU: Final = ("silu", "swish", "swiglu")
_TIED: Final = "tie_word_embeddings"
_HEAD: Final = "lm_head"
_EMBEDDING: Final = "embed_tokens.weight"
# Types of models whose window is off unless `use_sliding_window` turns it on.
_WINDOW_IS_OFF: Final = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
_CHUNK_BYTES: Final = 1 << 20


class _Place(NamedTuple):
    """Where a tensor is: its file, its first byte and number of bytes, and its dtype and shape."""

    file: Path
    start: int
    size: int
    form: tuple[str, tuple[int, ...]]


def check_floats(path: Path, model: Any) -> None:
    """Check that no layer would compute with integers. Raises `LoadFailed`."""
    for name, module in model.named_modules():
        weight = module.get("weight") if type(module) in _OF_FLOATS else None
        if isinstance(weight, mx.array) and not mx.issubdtype(weight.dtype, mx.floating):
            kind = str(weight.dtype).removeprefix("mlx.core.")
            message = f"{path} has {name}.weight in {kind}, which is read as whole numbers: 8-bit weights need scales"
            raise LoadFailed(Code.MODEL_UNSUPPORTED, message)


def check_activation(model: Any, section: Mapping[str, Any]) -> None:
    """Check that the class computes with the activation that the text configuration names. Raises `LoadFailed`."""
    stated = section.get("hidden_act")
    if not isinstance(stated, str) or stated.lower() in _SILU:
        return
    modules = {type(part).__module__ for part in model.modules()}
    if any(hasattr(sys.modules[name], "swiglu") for name in modules if name.startswith("mlx_lm.models.")):
        kind = section.get("model_type")
        message = f"mlx-lm's class for {kind!r} computes with silu, and config.json has hidden_act = {stated!r}"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)


def warn_of_window(path: Path, model: Any, section: Mapping[str, Any], max_context: int) -> None:
    """Warn of a sliding window in the text configuration that mlx-lm's class does not compute. With more tokens than
    the window the answers differ from those of transformers.
    """
    window, kinds = section.get("sliding_window"), section.get("layer_types")
    is_on = section.get("use_sliding_window", section.get("model_type") not in _WINDOW_IS_OFF)
    if not isinstance(window, int) or not 0 < window < max_context or is_on is False:
        return
    if isinstance(kinds, list) and "sliding_attention" not in kinds:
        return
    if any(isinstance(cache, RotatingKVCache | ChunkedKVCache) for cache in make_prompt_cache(model)):
        return
    message = (
        "%s: config.json has a sliding window of %d tokens, and mlx-lm's class attends to all: longer chats differ"
    )
    log.warning(message, path, window)


def untied(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration that does not tie the embedding to the head if the files hold another head.

    transformers 5 does the same; a class of mlx-lm drops the head of the files. Raises `UnusableWeights`.
    """
    text = config.get("text_config")
    sections = [section for section in (config, text) if isinstance(section, dict)]
    is_stated = all(section.get(_TIED) is False for section in sections)
    if is_stated or not _has_own_head(path):
        return dict(config)
    inner = {"text_config": {**text, _TIED: False}} if isinstance(text, dict) else {}
    return {**config, **inner, _TIED: False}


def check_head(path: Path, model: Any, loaded: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    """Check that a head that `untied` has found is used. Raises `LoadFailed`."""
    if loaded.get(_TIED) is not False or stated.get(_TIED) is False:
        return
    if not any(name.rpartition(".")[2] == _HEAD for name, _ in model.named_modules()):
        message = f"{path} has an {_HEAD} that differs from its embedding, and mlx-lm's class has none"
        raise LoadFailed(Code.MODEL_UNSUPPORTED, message)


def _has_own_head(path: Path) -> bool:
    places = _places(path)
    embedding, head = (places.get(name) for name in (_EMBEDDING, f"{_HEAD}.weight"))
    return embedding is not None and head is not None and not _is_equal(embedding, head)


def _places(path: Path) -> dict[str, _Place]:
    """Return where the embedding and the head of the text model are, by the end of their names."""
    found: dict[str, tuple[str, _Place]] = {}
    for file in weight_files(path):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        for name, entry in header.items():
            end = next((end for end in (_EMBEDDING, f"{_HEAD}.weight") if f".{name}".endswith(f".{end}")), None)
            # A head for multi-token prediction may have both, too, under a longer name.
            if end is None or (end in found and len(found[end][0]) <= len(name)):
                continue
            first, last = entry["data_offsets"]
            form = entry["dtype"], tuple(entry["shape"])
            found[end] = name, _Place(file, 8 + length + first, last - first, form)
    return {end: place for end, (_, place) in found.items()}


def _is_equal(one: _Place, other: _Place) -> bool:
    if one.form != other.form or one.size != other.size:
        return False
    with one.file.open("rb") as a, other.file.open("rb") as b:
        a.seek(one.start)
        b.seek(other.start)
        whole, rest = divmod(one.size, _CHUNK_BYTES)
        return all(a.read(size) == b.read(size) for size in (*repeat(_CHUNK_BYTES, whole), rest))
