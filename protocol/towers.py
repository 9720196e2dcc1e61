"""Towers of a checkpoint, its encoders of media, detected from its config.json and the names of its weights.

The gateway derives from them a model's memory and modalities before a load, the worker what to load.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

VISION_SECTIONS: Final = ("vision_config", "vit_config", "vision_tower_config")
AUDIO_SECTIONS: Final = ("audio_config",)
MEDIA_SECTIONS: Final = VISION_SECTIONS + AUDIO_SECTIONS
# Names in checkpoints of towers and of the projections between them and the text model.
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
