"""Facts about a checkpoint, from its config.json and the names of its weights: context window, towers, prediction
heads, rotary embeddings.

The gateway reports these facts before a load and estimates the model's memory from them; the worker uses them to load
the model, its towers and heads.

Kinds of models (text generation, embeddings, scores of pairs, audio) and their detection from a model's files.

The gateway determines the kind before a load, the worker during one; a model's setting `kind` overrides both.

Chat templates of a model: which of its named templates renders a chat.

The gateway shows clients what the templates can do, and the worker renders chats and detects the model's family with
them.

Quantized KV of a model: whether its configuration allows it, the group size, and the bits per value.
"""

import errno
import json
import math
import re
from collections.abc import Collection, Container, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, cast

TEXT: Final = "text"
EMBED: Final = "embed"
RERANK: Final = "rerank"
AUDIO: Final = "audio"
# sentence-transformers' file that lists the steps from hidden states to a vector.
MODULES: Final = "modules.json"
# Architectures without causal attention, which cannot generate text.
ENCODERS: Final = ("bert", "roberta", "xlm-roberta", "camembert", "modernbert", "nomic_bert")
# Speech-to-text families, under the names that mlx-audio uses.
TRANSCRIBERS: Final = ("whisper", "moonshine", "parakeet", "qwen3_asr")
# Parakeet has no model_type, but its configuration has a `target` with this prefix.
_PARAKEET_TARGET: Final = "nemo.collections.asr."
SPEAKERS: Final = ("soprano", "qwen3_tts")
# Soprano's config.json describes only its inner decoder, so a Soprano model is recognised by name.
_SOPRANO: Final = re.compile(r"(^|[-_.])soprano([-_.]|$)", re.IGNORECASE)
_CLASSIFIER: Final = "ForSequenceClassification"
# Embedding and reranking decoders have the configuration of a generating model, so they are recognised by name.
_RERANKER: Final = re.compile(r"rerank", re.IGNORECASE)
# Path of a snapshot in the Hugging Face cache.
_SNAPSHOT: Final = re.compile(r"models--(?:[^/]*--)?([^/]+)/snapshots/[^/]+$")
_EMBEDDER: Final = re.compile(r"(^|[-_.])embed(ding|der)?s?([-_.]|$)", re.IGNORECASE)


def kind_of(config: Mapping[str, Any], files: Container[str], name: str) -> str:
    """Return the kind of a model, from its config.json, the names of its files and the name of its repository."""
    architectures = config.get("architectures")
    listed = architectures if isinstance(architectures, list) else []
    if audio_family(config, name):
        return AUDIO
    if any(isinstance(each, str) and each.endswith(_CLASSIFIER) for each in listed):
        return RERANK
    last = _last_part(name)
    if _RERANKER.search(last):
        return RERANK
    is_encoder = config.get("model_type") in ENCODERS or config.get("use_bidirectional_attention") is True
    if MODULES in files or is_encoder or _EMBEDDER.search(last):
        return EMBED
    return TEXT


def audio_family(config: Mapping[str, Any], name: str) -> str:
    """Return the family of an audio model; empty for any other model."""
    model_type, target = config.get("model_type"), config.get("target")
    if isinstance(target, str) and target.startswith(_PARAKEET_TARGET):
        return "parakeet"
    if model_type in (*TRANSCRIBERS, *SPEAKERS):
        return str(model_type)
    return "soprano" if _SOPRANO.search(_last_part(name)) else ""


def _last_part(name: str) -> str:
    """Return the last part of a path or a repository's name; of a snapshot's path, that of its repository's name."""
    path = name.rstrip("/")
    snapshot = _SNAPSHOT.search(path)
    return snapshot[1] if snapshot is not None else path.rpartition("/")[2]


ADDITIONAL_TEMPLATES: Final = "additional_chat_templates"
_DEFAULT: Final = "default"
_TOOL_USE: Final = "tool_use"
# A template for answers from documents, which no request has: it never renders a plain chat.
_RAG: Final = "rag"


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Templates of chats without and with tools; each is empty if the model's files have none for such chats."""

    plain: str = ""
    with_tools: str = ""
    # Names of all templates of the model's files, for the message of a chat that none of them renders.
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, chat_template: Any) -> Self:
        """Choose from a template, from templates by name, or from a list as in tokenizer_config.json.

        As in transformers, `default` renders plain chats and `tool_use` chats with tools. Without a `default`, the only
        template renders all chats.
        """
        if isinstance(chat_template, str):
            return cls(chat_template, chat_template, (_DEFAULT,))
        named = _named(chat_template)
        only = next(iter(named)) if len(named) == 1 else _DEFAULT
        plain = named.get(only if only != _RAG else _DEFAULT, "")
        return cls(plain, named.get(_TOOL_USE, plain), tuple(named))

    @property
    def texts(self) -> tuple[str, ...]:
        """The templates in use. The one for tools is first, because it shows most of the model's markup."""
        return tuple(text for text in dict.fromkeys((self.with_tools, self.plain)) if text)


def _named(chat_template: Any) -> dict[str, str]:
    if isinstance(chat_template, list):
        entries = [cast(dict[str, Any], entry) for entry in cast(list[Any], chat_template) if isinstance(entry, dict)]
        chat_template = {entry.get("name"): entry.get("template") for entry in entries}
    named = cast(dict[Any, Any], chat_template) if isinstance(chat_template, dict) else {}
    return {name: text for name, text in named.items() if isinstance(name, str) and isinstance(text, str)}


# Possible group sizes. The values of a group share a scale and a bias; the first size that divides the head's width is
# used.
GROUPS: Final = (64, 32)
# Smallest number of bits per value that can be configured.
MIN_BITS: Final = 4
ALL_WHOLE: Final = "none of its layers keeps the KV of all tokens"
_NO_GROUP: Final = "its heads have {width} numbers, which neither 64 nor 32 divides"
_LATENT: Final = "its attention keeps a latent vector of each token (MLA), which is small already"
# https://github.com/ggml-org/llama.cpp/issues/21385: the biases of Qwen2's keys are far larger than the keys.
_BIASED: Final = "4 bits spoil the keys of Qwen2, whose biases are large; use kv_bits = 8"


def group_of(width: int) -> int | None:
    """Return the group size for heads of this width; None if no size divides it."""
    return next((group for group in GROUPS if width % group == 0), None)


def group_of_all(widths: Collection[int]) -> int:
    """Return the group size for heads of all these widths. Raises ValueError with the reason if there is none."""
    for width in widths:
        if group_of(width) is None:
            raise ValueError(_NO_GROUP.format(width=width))
    return min(group for width in widths if (group := group_of(width)) is not None)


def number_bits(bits: int, group: int, number_bytes: int) -> float:
    """Return the bits per value, including the value's share of a scale and a bias in the model's own dtype."""
    return bits + 2 * 8 * number_bytes / group


def obstacle(config: dict[str, Any], bits: int) -> str:
    """Return the reason, as a clause, why a model of this configuration cannot have quantized KV; empty if it can."""
    inner = config.get("text_config")
    text = config | inner if isinstance(inner, dict) else config
    if text.get("kv_lora_rank"):
        return _LATENT
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and kinds and "full_attention" not in kinds:
        return ALL_WHOLE
    width = text.get("head_dim")
    if isinstance(width, int) and width > 0 and group_of(width) is None:
        return _NO_GROUP.format(width=width)
    if bits == MIN_BITS and str(text.get("model_type", "")).startswith("qwen2"):
        return _BIASED
    return ""


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
