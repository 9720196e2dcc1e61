"""Tower of a vision model: the modules of mlx-vlm that convert media to features, without the language model.

Attachment of a vision tower to mlx-lm's text model, with the wrapped modules that it needs.
"""

import importlib.util
import json
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import mlx.core as mx
import mlx.nn as nn
import numpy.typing as npt
from mlx.utils import tree_flatten

from protocol.model_files import weight_files
from worker.errors import is_allocation_failure
from worker.vision.checkpoint import Needs, UnsupportedVision, known_weights, tower_config, tower_names
from worker.vision.multimodal_merge import MediaFeatures, MultimodalMerge, text_core

log = logging.getLogger("mlxd.worker")

MISSING: Final = "mlx-vlm is not installed; install it with: mlxctl setup vision"
# Names of inputs that mlx-vlm requires as Python numbers.
_SIZES: Final = ("image_sizes",)


class Tower:
    """Vision tower that encodes one medium at a time. Owned by the engine thread."""

    def __init__(self, model: Any, needs: Needs) -> None:
        self._model = model
        self.needs = needs

    @property
    def nbytes(self) -> int:
        parameters: Any = tree_flatten(self._model.parameters())
        return sum(int(array.nbytes) for _, array in parameters)

    def encode(self, kind: str, tokens: int, inputs: Mapping[str, npt.NDArray[Any]]) -> MediaFeatures:
        """Return the evaluated features of a medium. Raises ValueError for a wrong number of rows, and the tower's
        errors.
        """
        ids = mx.full((1, tokens), self.needs.placeholders[kind], dtype=mx.int32)
        if kind in self.needs.closing:
            ids[0, -1] = self.needs.closing[kind]
        arrays: dict[str, Any] = {name: mx.array(value) for name, value in inputs.items() if name not in _SIZES}
        arrays |= {name: [tuple(row) for row in inputs[name].tolist()] for name in _SIZES if name in inputs}
        pixels = arrays.pop("pixel_values", None)
        mask = mx.ones((1, tokens), dtype=mx.int32)
        output = self._model.get_input_embeddings(ids, pixels, mask=mask, **arrays)
        embeds = output.inputs_embeds[0]
        layers = tuple(output.deepstack_visual_embeds or ()) if self.needs.deepstack else ()
        rows = {len(embeds), *(len(layer) for layer in layers)}
        if rows != {tokens}:
            raise ValueError(f"the tower made {sorted(rows)} rows of features for {tokens} tokens")
        if self.needs.by_columns and kind == "image":
            embeds = _by_rows(embeds)
        if self.needs.scale != 1.0:
            embeds = embeds / self.needs.scale
        # The copies are contiguous, so that the tower's other outputs can be freed.
        features = MediaFeatures(mx.contiguous(embeds), tuple(mx.contiguous(layer) for layer in layers))
        mx.eval(features.embeds, *features.layers)
        return features


def load_tower(
    path: Path, folded: Mapping[str, Any], needs: Needs, dtype: mx.Dtype, retype: Callable[[Any], None]
) -> Tower:
    """Load the tower of a checkpoint whose files have been checked. `retype` changes the dtype of parameters in place.

    Raises `UnsupportedVision`, or mlx-vlm's error for an invalid checkpoint.
    """
    if importlib.util.find_spec("mlx_vlm") is None:
        raise UnsupportedVision(MISSING)
    from mlx_vlm.utils import get_model_and_args, load_model_weights, sanitize_weights, update_module_configs

    config = tower_config(folded)
    # mlx-vlm's function would run code in the checkpoint if it got the path, so it only gets the configuration.
    classes, _ = get_model_and_args(config)
    model_config = classes.ModelConfig.from_dict(config)
    model_config = update_module_configs(
        model_config, classes, config, ["text", "vision", "perceiver", "projector", "audio"]
    )
    model = classes.Model(model_config)
    weights = _read(path, config)
    weights = sanitize_weights(model, weights)
    for name in ("Vision", "Audio"):
        part = getattr(model_config, f"{name.lower()}_config", None)
        if hasattr(classes, f"{name}Model") and part is not None:
            weights = sanitize_weights(getattr(classes, f"{name}Model"), weights, part)
    width = int((config["text_config"] or config).get("hidden_size", 0))
    model.language_model = _EmptyLanguageModel(width, dtype)
    weights = {name: array for name, array in weights.items() if not name.startswith("language_model.")}
    weights = known_weights(model, weights)
    parts = {name for name, part in model.items() if isinstance(part, nn.Module)}
    load_model_weights(model, config, weights, path, lazy=True, declared_keys=set(weights))
    needs = _without(needs, {name for name in parts if model[name] is None})
    retype(model)
    mx.eval(model.parameters())
    return Tower(model, needs)


def _by_rows(embeds: mx.array) -> mx.array:
    """Reorder the features of a square image from columns to rows; the rows after the square stay."""
    side = math.isqrt(len(embeds))
    image = embeds[: side * side].reshape(side, side, -1).swapaxes(0, 1).reshape(side * side, -1)
    return mx.concatenate([image, embeds[side * side :]])


def _without(needs: Needs, missing: set[str]) -> Needs:
    """Reduce the requirements to the parts that the checkpoint has. Raises `UnsupportedVision` if vision is missing."""
    if any("audio" not in name for name in missing):
        raise UnsupportedVision(f"the checkpoint has no weights for {', '.join(sorted(missing))}")
    if not missing:
        return needs
    return replace(needs, placeholders={kind: id for kind, id in needs.placeholders.items() if kind != "audio"})


def _read(path: Path, config: Mapping[str, Any]) -> dict[str, mx.array]:
    """Map weights by name, lazily, so that only the tower's are loaded. mlx-vlm's own reader may rewrite a header."""
    weights: dict[str, mx.array] = {}
    for file in weight_files(path):
        weights.update(cast("dict[str, mx.array]", mx.load(str(file))))
    names = tower_names(weights, config)
    return {names[name]: array for name, array in weights.items()}


class _EmptyLanguageModel(nn.Module):
    """Replacement of mlx-vlm's language model. Its embeddings of placeholders are all overwritten by features."""

    # mlx-vlm's models read these attributes from a language model: no scale, no embeddings per layer, no positions.
    embed_scale = 1.0
    hidden_size_per_layer_input = 0

    def __init__(self, width: int, dtype: mx.Dtype) -> None:
        super().__init__()
        self._width, self._dtype = width, dtype

    @property
    def model(self) -> "_EmptyLanguageModel":
        return self

    def embed_tokens(self, ids: mx.array) -> mx.array:
        return mx.zeros((*ids.shape, self._width), dtype=self._dtype)

    def get_per_layer_inputs(self, _ids: mx.array) -> None:
        return None

    def get_rope_index(self, *_args: Any, **_kwargs: Any) -> tuple[None, None]:
        return None, None


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
