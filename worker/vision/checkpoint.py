"""Translation of vision checkpoints for mlx-lm and mlx-vlm: their configuration and the names of their weights."""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any, Final

from mlx.utils import tree_flatten

from protocol.checkpoint import fold_rope, is_tower

_TEXT: Final = re.compile(r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
# Matches names of parts that transformers 5 nests under `model` and mlx-vlm expects beside it.
_BELOW_MODEL: Final = re.compile(
    r"^model\.((?:vision_tower|multi_modal_projector|audio_tower|embed_audio|embed_vision|image_newline)\b)"
)
# transformers 5 omits the inner `vision_model` of these CLIP and SigLIP towers.
_NESTED_TOWERS: Final = ("clip_vision_model", "siglip_vision_model")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    section = config.get("text_config") or config.get("llm_config")
    return dict(section) if isinstance(section, dict) else dict(config)


def fold(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration to a format that both libraries read. Raises `UnusableRope`."""
    folded = fold_rope(config)
    text, vision = folded.get("text_config"), folded.get("vision_config")
    if isinstance(text, dict):
        _name_sizes(folded, text)
    kind = str(folded.get("model_type", ""))
    if isinstance(vision, dict) and kind.startswith(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")):
        vision["model_type"] = kind
    return folded


def tower_config(folded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a folded configuration for mlx-vlm, with the sections that it requires."""
    config = deepcopy(dict(folded))
    config.setdefault("text_config", config.pop("llm_config", {}))
    for section in ("vision_config", "audio_config"):
        config.setdefault(section, {})
    vision = config["vision_config"] or {}
    if config.get("model_type") == "llava" and vision.get("model_type") == "pixtral":
        config["model_type"] = "pixtral"
    if str(config.get("model_type")).startswith(("qwen2_vl", "qwen2_5_vl")):
        config = {**config["text_config"], **config}
    return config


def _name_sizes(config: dict[str, Any], text: dict[str, Any]) -> None:
    """Copy sizes to the keys that one of the libraries expects."""
    match config.get("model_type"):
        case "gemma3":
            config.setdefault("hidden_size", text.get("hidden_size"))
            if "mm_tokens_per_image" in config:
                text.setdefault("mm_tokens_per_image", config["mm_tokens_per_image"])
            _add_vocabulary(config, text)
        case "gemma4" | "gemma4_unified":
            _add_vocabulary(config, text)
        case "lfm2_vl":
            width, heads = text.get("hidden_size"), text.get("num_attention_heads")
            names = {
                "block_dim": width,
                "conv_dim": width,
                "block_ff_dim": text.get("intermediate_size"),
                "num_heads": heads,
            }
            for name, size in names.items():
                text.setdefault(name, size)
        case _:
            pass


def _add_vocabulary(config: dict[str, Any], text: dict[str, Any]) -> None:
    """Copy the vocabulary size to the root, where mlx-lm reads it; it would otherwise use its own default."""
    if "vocab_size" in text:
        config.setdefault("vocab_size", text["vocab_size"])


def text_names(names: Iterable[str]) -> list[dict[str, str]]:
    """Map the names of the text model's weights to each naming scheme of mlx-lm's classes."""
    kept = [name for name in names if not is_tower(name)]
    plain = {name: name if name.startswith("lm_head.") else _plain(name) for name in kept}
    return [
        {name: name for name in kept},
        {name: f"language_model.{short}" for name, short in plain.items()},
        {name: f"model.language_model.{short.removeprefix('model.')}" for name, short in plain.items()},
        plain,
    ]


def _plain(name: str) -> str:
    """Return the name of a weight in classes of text models, such as `model.layers…` or `lm_head…`."""
    short, count = _TEXT.subn("model.", name)
    return short.removeprefix("model.") if count and short.startswith("model.lm_head.") else short


def tower_names(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Map the names of weights to those that mlx-vlm's `sanitize` expects."""
    vision = config.get("vision_config") or {}
    is_nested = vision.get("model_type") in _NESTED_TOWERS and config.get("model_type") not in ("idefics3", "smolvlm")
    renamed = {name: _BELOW_MODEL.sub(r"\1", name) for name in names}
    if is_nested and not any("vision_model." in name for name in renamed):
        renamed = {old: new.replace("vision_tower.", "vision_tower.vision_model.") for old, new in renamed.items()}
    return renamed


def known_weights(model: Any, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the weights that a module has a parameter for, even if it is quantized later; drop all others."""
    modules = {name for name, _ in model.named_modules()}
    parameters: Any = tree_flatten(model.parameters())
    names = {name for name, _ in parameters}
    return {name: array for name, array in weights.items() if name in names or name.rpartition(".")[0] in modules}
