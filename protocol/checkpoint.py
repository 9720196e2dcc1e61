"""Facts about a checkpoint, from its config.json and the names of its weights: context window, towers, prediction
heads.

The gateway reports these facts before a load and estimates the model's memory from them; the worker uses them to load
the towers and heads.
"""

import re
from collections.abc import Mapping
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


def context_of(config: dict[str, Any]) -> tuple[str, Any] | None:
    """Return the first context-window key that the configuration or its text model sets, and the key's raw value.

    Return None if no key is set: the limits of the model class and of the tokenizer are known only at load.
    """
    text = config.get("text_config")
    parts = [part for part in (config, text) if isinstance(part, dict)]
    return next(((key, part[key]) for key in CONTEXT_KEYS for part in parts if part.get(key)), None)


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
