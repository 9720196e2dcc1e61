"""Check that a loaded model computes with the rotary embedding of its config.json.

A class of mlx-lm ignores keys that it has no argument for, and computes with its defaults.
"""

import math
from collections.abc import Mapping
from typing import Any

import mlx.nn as nn

from protocol.checkpoint import UNSCALED, is_scaled, kind_of_scaling, rope_tables
from protocol.failures import Code
from worker.errors import LoadFailed


def check_rope(model: Any, section: Mapping[str, Any]) -> None:
    """Compare the rotary embeddings of a model with its folded text configuration. Raises `LoadFailed`.

    Only what a module shows is compared: embeddings with frequencies of their own are taken as right.
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
    _check_thetas(section, tables, plain)
    _check_parts(section, tables, ropes)


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


def _ignored(section: Mapping[str, Any], kind: str, what: str) -> LoadFailed:
    layers = f" of its layers of {kind}" if kind else ""
    name = section.get("model_type")
    message = (
        f"mlx-lm's class for {name!r} does not apply the rotary embedding{layers} in config.json: it ignores {what}"
    )
    return LoadFailed(Code.MODEL_UNSUPPORTED, message)
