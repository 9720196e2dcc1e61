"""Checks of what a class of mlx-lm makes of a model's files: types of numbers, heads of their own, activations and
windows.

Check that a loaded model computes with the rotary embedding of its config.json.

A class of mlx-lm ignores keys that it has no argument for, and computes with its defaults. Numbers that no module of
mlx-lm has an argument for are set in the modules.
"""

import json
import logging
import math
import struct
import sys
from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ChunkedKVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE
from mlx_lm.models.switch_layers import SwitchLinear

from protocol.checkpoint import UNSCALED, is_scaled, kind_of_scaling, rope_tables
from protocol.failures import Code
from protocol.model_files import weight_files
from worker.errors import LoadFailed

log = logging.getLogger("mlxd.worker")

# Modules of mlx-lm that scale, none of which a table without scaling can use.
_SCALED_MODULES = (YarnRoPE, SuScaledRoPE, Llama3RoPE, DynamicNTKScalingRoPE)


def check_rope(model: Any, section: Mapping[str, Any]) -> None:
    """Compare the rotary embeddings of a model with its folded text configuration, and complete them.

    Only what a module shows is compared: embeddings with frequencies of their own are taken as right. Raises
    `LoadFailed`.
    """
    ropes = [part for part in model.modules() if _is_rope(part)]
    plain = [rope for rope in ropes if type(rope) is nn.RoPE]
    if not ropes:
        return
    tables = rope_tables(section)
    kinds = section.get("layer_types")
    if isinstance(kinds, list) and any(kind in kinds for kind in tables):
        tables = {kind: table for kind, table in tables.items() if kind in kinds}
    for kind, table in tables.items():
        # Several tables are scaled apart; one table may be for only some of the layers, as the class knows.
        is_apart = len(tables) > 1 and all(map(is_scaled, tables.values()))
        if is_scaled(table) and not _has_scaled(ropes, plain, table, is_apart=is_apart):
            raise _ignored(section, kind, f"the scaling {kind_of_scaling(table)!r}")
        if kind_of_scaling(table) in UNSCALED and all(isinstance(rope, _SCALED_MODULES) for rope in ropes):
            raise _ignored(section, kind, "that these are not scaled")
    _check_thetas(section, tables, plain)
    _check_parts(section, tables, ropes)
    _complete(section, tables, ropes)


def _is_rope(part: Any) -> bool:
    name = type(part).__name__.lower()
    return "rope" in name or "rotary" in name


def _has_scaled(ropes: list[Any], plain: list[nn.RoPE], table: Mapping[str, Any], *, is_apart: bool) -> bool:
    """Return whether the modules may be scaled as the table states."""
    unscaled = [rope for rope in plain if rope.scale == 1.0]
    if is_apart:
        return not unscaled
    if len(plain) < len(ropes):
        return True
    factor = table.get("factor")
    if kind_of_scaling(table) != "linear" or not isinstance(factor, int | float) or not factor:
        return len(unscaled) < len(plain)
    return any(math.isclose(rope.scale, 1 / factor, rel_tol=1e-6) for rope in plain)


def _check_thetas(section: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]], plain: list[nn.RoPE]) -> None:
    bases = {float(rope.base) for rope in plain}
    if not bases:
        return
    stated = {
        kind: float(theta)
        for kind, table in tables.items()
        if isinstance(theta := table.get("rope_theta"), int | float)
        if kind_of_scaling(table) in (*UNSCALED, "linear")
    }
    own = ", ".join(f"{base:g}" for base in sorted(bases))
    for kind, theta in stated.items():
        if theta not in bases:
            raise _ignored(section, kind, f"rope_theta = {theta:g}; it has {own}")


def _check_parts(section: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]], ropes: list[Any]) -> None:
    hidden, heads = section.get("hidden_size"), section.get("num_attention_heads")
    width = section.get("head_dim") or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None)
    dims = {getattr(rope, "dims", None) for rope in ropes}
    for kind, table in tables.items():
        part = table.get("partial_rotary_factor")
        is_part = isinstance(part, int | float) and part < 1 and kind_of_scaling(table) != "proportional"
        if is_part and width is not None and dims == {width}:
            raise _ignored(section, kind, f"partial_rotary_factor = {part:g}; it rotates whole heads")


def _complete(section: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]], ropes: list[Any]) -> None:
    """Set the numbers of tables in the modules that scale with them (transformers/modeling_rope_utils.py)."""
    scaled = {kind: table for kind, table in tables.items() if is_scaled(table)}
    modules = [rope for rope in ropes if isinstance(rope, _SCALED_MODULES)]
    if len(scaled) > 1 and any(_own_numbers(table) for table in scaled.values()):
        raise _ignored(section, "", "numbers of one of several scaled tables")
    for kind, table in scaled.items():
        own = _own_numbers(table)
        if not own:
            continue
        if not modules or not all(isinstance(rope, YarnRoPE | SuScaledRoPE) for rope in modules):
            raise _ignored(section, kind, " and ".join(own))
        for rope in modules:
            if isinstance(rope, SuScaledRoPE):
                rope._scale = _longrope_scale(table)  # pyright: ignore[reportPrivateUsage]  # it is no argument
            elif isinstance(rope, YarnRoPE):
                rope.mscale = table.get("attention_factor", rope.mscale)
                if table.get("truncate") is False:
                    rope._freqs = _untruncated(rope, table, section)  # pyright: ignore[reportPrivateUsage]  # as above


def _own_numbers(table: Mapping[str, Any]) -> list[str]:
    """Return the keys of a scaled table that no module of mlx-lm has an argument for."""
    kind = kind_of_scaling(table)
    keys = {"attention_factor"} if kind in ("yarn", "longrope") else set[str]()
    if kind == "longrope" and not {"short_mscale", "long_mscale"} & table.keys():
        keys.add("factor")
    own = sorted(keys & table.keys())
    return [*own, "truncate"] if kind == "yarn" and table.get("truncate") is False else own


def _longrope_scale(table: Mapping[str, Any]) -> float:
    if "attention_factor" in table:
        return float(table["attention_factor"])
    factor, original = table["factor"], table["original_max_position_embeddings"]
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _untruncated(rope: YarnRoPE, table: Mapping[str, Any], section: Mapping[str, Any]) -> mx.array:
    """Return YaRN's wavelengths with a ramp between the dimensions as computed, instead of whole ones."""
    dims, base, factor = rope.dims, table.get("rope_theta"), table["factor"]
    if base is None:
        raise _ignored(section, "", "truncate, which needs a rope_theta")

    def dimension(turns: float) -> float:
        original = table["original_max_position_embeddings"]
        return dims * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(dimension(table.get("beta_fast", 32)), 0)
    high = min(dimension(table.get("beta_slow", 1)), dims - 1)
    high += 0.001 if low == high else 0
    ramp = mx.clip((mx.arange(dims // 2, dtype=mx.float32) - low) / (high - low), 0, 1)
    wavelengths = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    return wavelengths / (ramp / factor + 1 - ramp)


def _ignored(section: Mapping[str, Any], kind: str, what: str) -> LoadFailed:
    layers = f" of its layers of {kind}" if kind else ""
    name = section.get("model_type")
    message = (
        f"mlx-lm's class for {name!r} does not apply the rotary embedding{layers} in config.json: it ignores {what}"
    )
    return LoadFailed(Code.MODEL_UNSUPPORTED, message)


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
