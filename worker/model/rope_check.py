"""Check that a loaded model computes with the rotary embedding of its config.json.

A class of mlx-lm ignores keys that it has no argument for, and computes with its defaults. Numbers that no module of
mlx-lm has an argument for are set in the modules.
"""

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.rope_utils import DynamicNTKScalingRoPE, Llama3RoPE, SuScaledRoPE, YarnRoPE

from protocol.checkpoint import UNSCALED, is_scaled, kind_of_scaling, rope_tables
from protocol.failures import Code
from worker.errors import LoadFailed

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
