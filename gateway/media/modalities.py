"""Modalities of a model other than text. The worker reports them; before the model is loaded, its files show them."""

import importlib.util
import json
from collections.abc import Iterable
from typing import Any, Final

from gateway.errors import BadRequest
from gateway.model_files.metadata import Unreadable, declared_modalities, find
from protocol.from_worker import Ready
from protocol.to_worker import Media

TEXT: Final = "text"
SETUP: Final = "mlxctl setup vision"
# Rate limits use these estimates until the worker has counted the tokens of a medium.
TOKENS: Final = {"image": 1024, "video": 4096, "audio": 512}
_PLURALS: Final = {"image": "images", "video": "videos", "audio": "audio"}


def expected(path: str) -> tuple[str, ...] | None:
    """Return the modalities for which a model's files have towers. The worker may support fewer.

    Returns None if the files cannot be read.
    """
    try:
        config: Any = json.loads((find(path) / "config.json").read_bytes())
    except (Unreadable, OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    return declared_modalities(config)


def modalities(path: str, ready: Ready | None) -> tuple[str, ...]:
    """Return the modalities that prompts may have. The worker reports them; before the model is loaded, they are those
    in its files that can be served.
    """
    if ready is not None:
        return (TEXT, *ready.modalities)
    return (TEXT, *(expected(path) or ())) if has_towers_library() else (TEXT,)


def has_towers_library() -> bool:
    """Whether mlx-vlm is installed. It has the encoders of all modalities."""
    return importlib.util.find_spec("mlx_vlm") is not None


def likely_tokens(media: Iterable[Media]) -> int:
    """Estimate the tokens of media in a prompt."""
    return sum(TOKENS[each.kind] for each in media)


def check(name: str, path: str, ready: Ready | None, media: Iterable[Media]) -> None:
    """Raises `BadRequest` for a medium that the model does not accept. Before the model is loaded, not all is known."""
    first = {each.kind: each.param for each in reversed(list(media))}
    if not first:
        return
    taken = expected(path) if ready is None else ready.modalities
    if taken is None:
        return
    for kind, param in first.items():
        if kind in taken and (ready is not None or has_towers_library()):
            continue
        reason = _reason(kind, path, ready, kind in taken)
        raise BadRequest(
            f"'{param}': the model {name!r} takes no {_PLURALS[kind]}: {reason}.", param, "unsupported_modality"
        )


def _reason(kind: str, path: str, ready: Ready | None, is_promised: bool) -> str:
    if ready is not None and ready.media is not None and ready.media.reason:
        return ready.media.reason.rstrip(".")
    if is_promised or (ready is not None and kind in (expected(path) or ()) and not has_towers_library()):
        return f"mlx-vlm, which encodes them, is not installed (operator: {SETUP})"
    taken = (TEXT, *(ready.modalities if ready is not None else expected(path) or ()))
    return f"it takes {', '.join(taken)}"
