"""Attachment of a vision tower to mlx-lm's text model, with the wrapped modules that it needs."""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from worker.errors import is_allocation_failure
from worker.vision.multimodal_merge import MultimodalMerge, text_core
from worker.vision.needs import Needs, UnsupportedVision
from worker.vision.tower import Tower, load_tower

log = logging.getLogger("mlxd.worker")


@dataclass(slots=True, frozen=True)
class Vision:
    """Parts of a model in addition to its text model. `config` is the folded configuration."""

    needs: Needs
    merge: MultimodalMerge
    tower: Tower
    config: Mapping[str, Any]


def attach(path: Path, folded: Mapping[str, Any], model: Any, retype: Callable[[Any], None]) -> Vision:
    """Load the tower of a checkpoint and wrap modules of its text model, which stays unchanged if this raises.

    `retype` changes the dtype of a module's parameters in place. Raises `UnsupportedVision` with the reason why the
    model is served as text only; failed allocations propagate.
    """
    needs = Needs.of({**folded, "generation_config": _generation(path)})
    try:
        core = text_core(model)
        dtype = _dtype(core.embed_tokens)
        tower = load_tower(path, folded, needs, dtype, retype)
    except UnsupportedVision:
        raise
    except Exception as error:  # code of any architecture may raise any exception
        if is_allocation_failure(error):
            raise
        log.warning("the tower of %s could not be loaded", path, exc_info=True)
        reason = str(error).partition("\n")[0]
        raise UnsupportedVision(f"its tower could not be loaded: {type(error).__name__}: {reason}") from error
    merge = MultimodalMerge(model, needs)
    model.multimodal_merge = merge
    return Vision(tower.needs, merge, tower, folded)


def _dtype(table: Any) -> mx.Dtype:
    """Return the dtype of a table's embeddings, which for a quantized table is the dtype of its scales."""
    return (table.scales if "scales" in table else table.weight).dtype


def _generation(path: Path) -> Any:
    """Read the checkpoint's `generation_config.json`; {} if it is missing or cannot be read."""
    try:
        return json.loads((path / "generation_config.json").read_bytes())
    except (OSError, ValueError):
        return {}
