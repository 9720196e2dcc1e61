"""Requirements of a vision model's text part: the media that a checkpoint takes, and the wrappers that it needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from protocol.checkpoint import has_media
from worker.vision.checkpoint import text_config

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
