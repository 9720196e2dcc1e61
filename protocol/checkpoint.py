"""Facts about a checkpoint, from its config.json and the names of its weights: context window, towers, prediction
heads, rotary embeddings.

The gateway reports these facts before a load and estimates the model's memory from them; the worker uses them to load
the model, its towers and heads.
"""

import errno
import json
import math
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

CONTEXT_KEYS: Final = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "max_seq_length",
    "n_ctx",
    "model_max_length",
)


def file_bytes(file: Path) -> bytes:
    """Return the content of a model's file. Raises `OSError`, also for a FIFO or a device, whose read may not end."""
    if file.exists() and not file.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return file.read_bytes()


def file_json(file: Path) -> Any:
    """Return the content of a model's JSON file. Raises `OSError`, and `ValueError` for other content."""
    try:
        return json.loads(file_bytes(file))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


# Factors above this number cannot be meant.
_MAX_FACTOR: Final = 1_000_000


def context_of(config: dict[str, Any]) -> tuple[str, Any] | None:
    """Return the first context-window key that the configuration or its text model sets, and the key's value: raw, or
    raised by the scaling of the rotary embedding.

    Return None if no key is set: the limits of the model class and of the tokenizer are known only at load.
    """
    text = config.get("text_config")
    parts = [part for part in (config, text) if isinstance(part, dict)]
    named = next(((key, part[key]) for key in CONTEXT_KEYS for part in parts if part.get(key)), None)
    if named is None or not isinstance(named[1], int | float):
        return named
    whole: dict[str, Any] = {key: value for part in parts for key, value in part.items()}
    scaled = _scaled_context(whole, named[1])
    return named if scaled <= named[1] else (named[0], scaled)


def _scaled_context(section: Mapping[str, Any], stated: float) -> int:
    """Return the context to which the rotary embedding is scaled; 0 if it is not, or `stated` counts it already.

    llama3 and longrope state their scaled context, and so do the files of Gemma 3. YaRN scales the original context,
    which is often what `max_position_embeddings` still states (vllm/config/model.py, `_get_and_verify_max_len`).
    """
    tables = rope_tables(section)
    table = tables.get(FULL) or next(iter(tables.values()))
    kind, factor = kind_of_scaling(table), table.get("factor")
    is_raising = kind.endswith("yarn") or kind in ("linear", "dynamic")
    if not is_raising or str(section.get("model_type")).startswith("gemma3"):
        return 0
    if not isinstance(factor, int | float) or not 1 < factor < _MAX_FACTOR:
        return 0
    original = table.get(_ORIGINAL) or section.get(_ORIGINAL)
    return int((original if isinstance(original, int | float) else stated) * factor)


VISION_SECTIONS: Final = ("vision_config", "vit_config", "vision_tower_config")
AUDIO_SECTIONS: Final = ("audio_config",)
MEDIA_SECTIONS: Final = VISION_SECTIONS + AUDIO_SECTIONS
# Names of the weights of towers, and of the projections between towers and the text model.
_TOWER: Final = re.compile(
    r"^(model\.)?(visual|vision_tower|vision_model|vision_encoder|vision_embedder|vision_projection|vision_projector"
    r"|vision_embed_tokens|multi_modal_projector|mm_projector|patch_merger|connector|audio_tower|audio_encoder"
    r"|embed_audio|embed_vision|image_newline)\b"
)


def has_media(config: Mapping[str, Any]) -> bool:
    """Whether a configuration describes a tower, with or without its weights."""
    return has_section(config, MEDIA_SECTIONS)


def has_section(config: Mapping[str, Any], sections: tuple[str, ...]) -> bool:
    return any(isinstance(config.get(section), dict) and config[section] for section in sections)


def is_tower(name: str) -> bool:
    """Whether a weight belongs to a tower, by its name in the checkpoint."""
    return _TOWER.match(name) is not None


# Types of models whose prediction heads are supported, in the format of their published checkpoints.
SUPPORTED_TYPES: Final = frozenset(
    {
        "bailing_moe", "deepseek_v3", "deepseek_v32", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite",
        "glm_moe_dsa", "longcat_flash", "mimo", "mimo_v2_flash", "qwen3_5", "qwen3_5_moe", "qwen3_next", "step3p5",
    }
)  # fmt: skip
# Patterns in the names of a prediction head's tensors. A head stored as an additional layer has an `eh_proj`, which
# projects two hidden states.
_NAMES: Final = re.compile(r"(^|\.)(mtp|nextn)[._]|\.eh_proj\.")


def is_head(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to a prediction head."""
    return _NAMES.search(name) is not None


def unused(model_type: str) -> str:
    """Return the reason why a checkpoint's prediction head is not used; empty if the head is used."""
    return "" if model_type in SUPPORTED_TYPES else f"its head is there and not used: those of {model_type} are not run"


# Rotary embeddings: transformers 5 writes `rope_parameters` alone, flat, or with a table for each type of layer. Most
# classes of mlx-lm know only `rope_theta` and `rope_scaling`, and compute with their defaults if these are missing.
FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
# Types of embeddings whose positions are not scaled.
UNSCALED: Final = ("default", "mrope")
# Older keys of one number. The classes of the libraries differ in which of them they read.
_THETA: Final = ("rope_theta", "rotary_emb_base", "rope_global_base_freq", "global_rope_theta")
_SLIDING_THETA: Final = ("rope_local_base_freq", "rope_local_theta", "swa_rope_theta", "local_rope_theta")
_PART: Final = ("partial_rotary_factor", "rotary_pct")
_TABLES: Final = ("rope_parameters", "rope_scaling")
_KIND_KEYS: Final = ("type", "rope_type")
# Keys of `rope_parameters` that `rope_scaling` never had.
_NOT_SCALING: Final = ("rope_theta", "partial_rotary_factor")
# Other names of a type, under the one that mlx-lm's classes know.
_SAME_KIND: Final = {"su": "longrope", "mrope": UNSCALED[0]}
# Types whose frequencies depend on the context of the training before they were scaled, and the key of that context.
_OF_ORIGINAL: Final = ("yarn", "llama3", "longrope")
_ORIGINAL: Final = "original_max_position_embeddings"
# Keys whose numbers are above zero, and keys of other numbers.
_POSITIVE: Final = (*_THETA, *_SLIDING_THETA, *_PART, "factor", _ORIGINAL)
_NUMBERS: Final = (
    *_POSITIVE, "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow",
    "low_freq_factor", "high_freq_factor",
)  # fmt: skip


class UnusableRope(ValueError):
    """Raised for a rotary embedding that a configuration states in two ways, or not in numbers."""


def fold_rope(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration, or a section of one, with both forms of what it and its sections state.

    Raises `UnusableRope` if both forms state a number, and the numbers differ, and for values that are no such number.
    """
    folded = {
        key: fold_rope(value) if isinstance(value, dict) and key not in _TABLES else deepcopy(value)
        for key, value in section.items()
    }
    _check_numbers(folded, "config.json")
    _complete_tables(folded)
    if isinstance(scaling := folded.get("rope_scaling"), dict):
        _agree(folded, _THETA[:1], scaling.get("rope_theta"))
        folded["rope_scaling"] = _typed(scaling)
    rope = folded.get("rope_parameters")
    if not isinstance(rope, dict) or not rope:
        # Some classes read `rope_parameters` alone, such as that of Qwen3.5.
        (table,) = rope_tables(folded).values()
        if isinstance(table.get("rope_theta"), int | float) and not any(key in folded for key in _SLIDING_THETA):
            folded["rope_parameters"] = {**table, "rope_type": kind_of_scaling(table)}
        return folded
    tables = _by_layer_type(rope)
    main = tables.get(FULL) or next(iter(tables.values()))
    _agree(folded, _THETA, main.get("rope_theta"))
    _agree(folded, _SLIDING_THETA, tables.get(SLIDING, {}).get("rope_theta"))
    parts = [table.get("partial_rotary_factor") for table in tables.values()]
    if all(part == parts[0] for part in parts):
        _agree(folded, _PART, parts[0])
        _add_width(folded, parts[0])
    if kind_of_scaling(main) == "longrope":
        _agree(folded, ("original_max_position_embeddings",), main.get("original_max_position_embeddings"))
    _fold_scaling(folded, main)
    return folded


def _complete_tables(section: dict[str, Any]) -> None:
    """Check the tables of a section, drop their nulls, and add the original context where transformers takes another.

    transformers 5 reads tables for each type of layer under either key. Raises `UnusableRope`.
    """
    for key in _TABLES:
        if not isinstance(rope := section.get(key), dict):
            continue
        for table in [rope, *(table for table in rope.values() if isinstance(table, dict))]:
            _check_numbers(table, f"{key} of config.json")
            for name in [name for name, value in table.items() if value is None and name in (*_NUMBERS, *_KIND_KEYS)]:
                del table[name]
            kinds = {_SAME_KIND.get(str(table[name]), str(table[name])) for name in _KIND_KEYS if name in table}
            if len(kinds) > 1:
                names = " and ".join(json.dumps(table[name]) for name in _KIND_KEYS)
                raise UnusableRope(f"{key} of config.json gives {' and '.join(_KIND_KEYS)} as {names}")
            original = section.get(_ORIGINAL) or section.get("max_position_embeddings")
            if kinds & {*_OF_ORIGINAL} and original:
                table.setdefault(_ORIGINAL, original)
    if _is_by_layer_type(scaling := section.get("rope_scaling")):
        if section.get("rope_parameters"):
            raise UnusableRope("rope_scaling and rope_parameters of config.json both have tables by type of layer")
        section["rope_parameters"], section["rope_scaling"] = scaling, None


def _check_numbers(table: Mapping[str, Any], place: str) -> None:
    for key in _NUMBERS:
        value = table.get(key)
        if value is None or isinstance(
            value, list | dict
        ):  # of each layer; whether the class reads it is checked later
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (key in _POSITIVE and value <= 0):
            raise UnusableRope(f"{place} gives {key} as {json.dumps(value)}")


def rope_tables(section: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rotary embedding that a folded section states, as a table for each type of layer.

    The type is empty where the section states one table for all layers.
    """
    rope, scaling = section.get("rope_parameters"), section.get("rope_scaling")
    if not rope and _is_by_layer_type(scaling):
        rope = scaling
    if isinstance(rope, dict) and rope:
        return _by_layer_type(rope)
    table: dict[str, Any] = dict(scaling) if isinstance(scaling, dict) else {}
    for key, names in (("rope_theta", _THETA), ("partial_rotary_factor", _PART)):
        if (value := next((section[name] for name in names if section.get(name) is not None), None)) is not None:
            table.setdefault(key, value)
    return {"": table}


def kind_of_scaling(table: Mapping[str, Any]) -> str:
    """Return the type of a table, such as `yarn`."""
    kind = str(table.get("type") or table.get("rope_type") or UNSCALED[0])
    return kind if kind in UNSCALED else _SAME_KIND.get(kind, kind)


def is_scaled(table: Mapping[str, Any]) -> bool:
    """Return whether a table scales positions or frequencies for a longer context."""
    kind = kind_of_scaling(table)
    return kind == "longrope" or (kind not in (*UNSCALED, "proportional") and table.get("factor") not in (1, 1.0))


def _is_by_layer_type(rope: Any) -> bool:
    return isinstance(rope, dict) and any(isinstance(table, dict) for table in rope.values())


def _by_layer_type(rope: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    tables = {kind: dict(table) for kind, table in rope.items() if isinstance(table, dict)}
    return tables or {"": dict(rope)}


def _fold_scaling(section: dict[str, Any], table: Mapping[str, Any]) -> None:
    stated = _typed({key: value for key, value in table.items() if key != "rope_theta"})
    is_needed = kind_of_scaling(stated) not in UNSCALED or "mrope_section" in stated
    scaling = section.get("rope_scaling")
    if not isinstance(scaling, dict):
        # Some classes have no default for the key.
        section["rope_scaling"] = stated if is_needed else None
        return
    if not is_needed and kind_of_scaling(scaling) in UNSCALED:
        return
    for key in sorted({*scaling, *stated} - {*_NOT_SCALING, "type", "rope_type"}):
        ours, theirs = scaling.get(key), stated.get(key)
        if ours != theirs and (key == "mrope_section" or (ours is not None and theirs is not None)):
            raise UnusableRope(f"rope_scaling and rope_parameters of config.json differ in {key}: {ours} and {theirs}")
    kinds = kind_of_scaling(scaling), kind_of_scaling(stated)
    if kinds[0] != kinds[1] and not set(kinds) <= set(UNSCALED):
        raise UnusableRope(f"rope_scaling of config.json has the type {kinds[0]}, and rope_parameters {kinds[1]}")


def _typed(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with its type under both names, and its factor as the float that some classes insist on."""
    if "mrope_section" in scaling and "type" in scaling:
        return dict(scaling)
    kind = kind_of_scaling(scaling)
    typed = {**scaling, "type": kind, "rope_type": kind}
    if type(typed.get("factor")) is int:
        typed["factor"] = float(typed["factor"])
    return typed


def _add_width(section: dict[str, Any], part: Any) -> None:
    """Add the number of rotated dimensions, which classes of MiniMax read instead of the part of a head."""
    if str(section.get("model_type", "")).startswith("minimax") and part and section.get("head_dim"):
        section.setdefault("rotary_dim", int(section["head_dim"] * part))


def _agree(section: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    if value is None:
        return
    for key in keys:
        if section.get(key) is None:
            section[key] = value
        elif section[key] != value:
            raise UnusableRope(f"config.json gives {key} as {section[key]}, and as {value} in rope_parameters")
