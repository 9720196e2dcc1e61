"""Translation of vision checkpoints for mlx-lm and mlx-vlm: their configuration and the names of their weights.

Requirements of a vision model's text part: the media that a checkpoint takes, and the wrappers that it needs.

Loader of mlx-lm's text model from a vision checkpoint, regardless of weight names and other contents of the
checkpoint.
"""

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from protocol.checkpoint import fold_rope, has_media, is_tower

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


# Families with special attention or decoding that mlxd does not support, with the reason.
_UNSUPPORTED: Final = {
    "mllama": "cross-attention to the image",
    "paligemma": "attention of its own over the prompt",
    "florence2": "an encoder and a decoder",
    "nemotron_parse": "an encoder and a decoder",
    "falcon_ocr": "attention of its own over the prompt",
    "diffusion_gemma": "diffusion of text",
}
# Families whose positions in space mlxd computes.
_MROPE: Final = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
_PLACEHOLDERS: Final = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index"),
}
# Configuration keys of the ids around media, which a model gets as input but must not generate.
_BORDERS: Final = (
    "vision_start_token_id", "vision_end_token_id", "boi_token_id", "boi_token_index", "eoi_token_id",
    "eoi_token_index", "boa_token_id", "boa_token_index", "eoa_token_id", "eoa_token_index",
)  # fmt: skip
# Text models of mlx-lm that multiply embeddings by the square root of their width after the table. The features of a
# tower must not be multiplied.
_SCALED: Final = ("gemma3n", "gemma4", "gemma4_unified")
# Families whose tower also embeds the token after a medium, with the configuration key of that token's id by kind.
_CLOSED: Final = {"gemma3n": {"image": "eoi_token_id", "audio": "eoa_token_id"}}
# Families whose mlx-vlm tower returns image features by column, while the text model expects them by row.
_BY_COLUMNS: Final = ("gemma3n",)


class UnsupportedVision(Exception):
    """Raised with the reason why a model takes text only."""


@dataclass(slots=True, frozen=True)
class Mrope:
    """Rotary embedding in time, height and width: `section` is the number of frequencies of each axis."""

    dims: int
    base: float
    section: tuple[int, ...]
    is_interleaved: bool


@dataclass(slots=True, frozen=True)
class Needs:
    """Requirements of one checkpoint. `placeholders` are ids by kind of medium; `block` names the layers in which
    tokens of a medium attend to each other.

    `closing` are ids, by kind, of the token after a medium; the tower embeds it as its last row. With `by_columns`, the
    tower returns the features of a square image by column.
    """

    placeholders: dict[str, int]
    suppressed: tuple[int, ...] = ()
    mrope: Mrope | None = None
    deepstack: int = 0
    block: str = ""
    scale: float = 1.0
    closing: Mapping[str, int] = field(default_factory=dict[str, int])
    by_columns: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Needs":
        """Read the requirements from a folded configuration. Raises `UnsupportedVision`."""
        kind = str(config.get("model_type", ""))
        if not has_media(config):
            raise UnsupportedVision("the model has no tower for media")
        if kind in _UNSUPPORTED:
            raise UnsupportedVision(f"'{kind}' has {_UNSUPPORTED[kind]}, which mlxd does not run")
        text = text_config(config)
        placeholders = _placeholders(config)
        if not placeholders:
            raise UnsupportedVision("config.json names no placeholder token for media")
        mrope = _mrope(text)
        if mrope is not None and kind not in _MROPE:
            raise UnsupportedVision(f"positions in space of '{kind}' are not known to mlxd")
        borders = [config[key] for key in _BORDERS if isinstance(config.get(key), int)]
        return cls(
            placeholders=placeholders,
            suppressed=tuple(sorted({*placeholders.values(), *borders, *_suppressed(config)})),
            mrope=mrope,
            deepstack=len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ()),
            block=_block(kind, text),
            scale=float(text.get("hidden_size", 1)) ** 0.5 if kind in _SCALED else 1.0,
            closing=_closing(kind, config, placeholders),
            by_columns=kind in _BY_COLUMNS,
        )


def _placeholders(config: Mapping[str, Any]) -> dict[str, int]:
    sections = {"image": "vision_config", "video": "vision_config", "audio": "audio_config"}
    return {
        kind: int(next(config[key] for key in keys if isinstance(config.get(key), int)))
        for kind, keys in _PLACEHOLDERS.items()
        if config.get(sections[kind]) and any(isinstance(config.get(key), int) for key in keys)
    }


def _closing(kind: str, config: Mapping[str, Any], placeholders: Mapping[str, int]) -> dict[str, int]:
    keys = {medium: key for medium, key in _CLOSED.get(kind, {}).items() if medium in placeholders}
    missing = [key for key in keys.values() if not isinstance(config.get(key), int)]
    if missing:
        raise UnsupportedVision(f"config.json lacks {' and '.join(missing)}")
    return {medium: int(config[key]) for medium, key in keys.items()}


def _suppressed(config: Mapping[str, Any]) -> list[int]:
    generation = config.get("generation_config")
    listed = generation.get("suppress_tokens") if isinstance(generation, dict) else None
    return [int(token) for token in listed or ()]


def _mrope(text: Mapping[str, Any]) -> Mrope | None:
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return None
    heads = int(text.get("num_attention_heads", 1))
    width = int(text.get("head_dim") or text["hidden_size"] // heads)
    part = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    base = float(rope.get("rope_theta") or text["rope_theta"])
    return Mrope(int(width * part), base, tuple(rope["mrope_section"]), bool(rope.get("mrope_interleaved")))


def _block(kind: str, text: Mapping[str, Any]) -> str:
    if kind == "gemma3":
        return "all"
    if kind in ("gemma4", "gemma4_unified") and text.get("use_bidirectional_attention") == "vision":
        return "sliding"
    return ""


# Text model types that can be wrapped by each of these mlx-lm classes. The classes themselves accept any checkpoint
# with their model type.
_WRAPPED: Final = {"llava": ("llama", "mistral", "ministral3", "mistral4")}


def load_text_model(view: Path, trust_code: bool) -> tuple[Any, dict[str, Any]]:
    """Load lazily like mlx-lm's `load_model`, without the weights of towers and unknown weights.

    `view` is the folder of a `checkpoint_view`, with a folded configuration.
    """
    return load_model(view, lazy=True, get_model_classes=_classes, trust_remote_code=trust_code)


def _classes(config: dict[str, Any]) -> tuple[type[Any], Any]:
    """Return mlx-lm's class and its arguments class: for the model, or for its text part if mlx-lm has no class for the
    model."""
    text = config.get("text_config")
    kind = text.get("model_type") if isinstance(text, dict) else None
    if kind is not None and kind not in _WRAPPED.get(config["model_type"], (kind,)):
        return _of_text(text or {})
    try:
        model, arguments = _get_classes(config)
    except ValueError:
        if kind is None:
            raise
        return _of_text(text or {})
    return _tolerant(model), arguments


def _of_text(text: dict[str, Any]) -> tuple[type[Any], Any]:
    model, arguments = _get_classes({"model_type": text["model_type"]})
    return _tolerant(model), _OfText(arguments)


class _OfText:
    """Arguments class that reads a text model's section from the configuration of the whole model."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments

    def from_dict(self, config: dict[str, Any]) -> Any:
        text = dict(config["text_config"])
        # The text model's embeddings are tied if the whole model's configuration says so.
        if "tie_word_embeddings" in config:
            text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
        return self._arguments.from_dict(text)


def _tolerant(model: Any) -> type[Any]:
    """Return a subclass of `model` that accepts weights in any naming scheme and ignores unknown ones."""

    class Text(model):
        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            first: dict[str, Any] | None = None
            for names in text_names(weights):
                try:
                    renamed = {new: weights[old] for old, new in names.items()}
                    renamed = super().sanitize(renamed) if hasattr(model, "sanitize") else renamed
                except (KeyError, ValueError):
                    continue
                known = known_weights(self, renamed)
                parameters: Any = tree_flatten(self.parameters())
                if all(name in known for name, _ in parameters):
                    return known
                first = known if first is None else first
            if first is None:
                raise ValueError("the checkpoint holds no weights of a text model")
            return first

    Text.__name__ = Text.__qualname__ = model.__name__
    return Text
