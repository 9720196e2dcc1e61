"""mlx-lm's text model of a vision checkpoint, whatever the checkpoint calls its weights and whatever else it holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from worker.vision.checkpoint import known_weights, text_names

# Classes of mlx-lm that take any checkpoint of their name for one of these text models.
_WRAPPED: Final = {"llava": ("llama", "mistral", "ministral3", "mistral4")}


def load_text_model(
    path: Path, config: Mapping[str, Any], folded: dict[str, Any], trust_code: bool
) -> tuple[Any, dict[str, Any]]:
    """As mlx-lm's `load_model`, not computed, with weights of towers and unknown ones left out."""
    changed = {key: value for key, value in folded.items() if config.get(key) != value}
    return load_model(path, lazy=True, model_config=changed, get_model_classes=_classes, trust_remote_code=trust_code)


def _classes(config: dict[str, Any]) -> tuple[type[Any], Any]:
    """The class of the model where mlx-lm has one, else that of its text part, with their arguments."""
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
    """Arguments of a text model, from the configuration of the model around it."""

    def __init__(self, arguments: Any) -> None:
        self._arguments = arguments

    def from_dict(self, config: dict[str, Any]) -> Any:
        text = dict(config["text_config"])
        # Where the whole model says so, its text model is tied.
        if "tie_word_embeddings" in config:
            text.setdefault("tie_word_embeddings", config["tie_word_embeddings"])
        return self._arguments.from_dict(text)


def _tolerant(model: Any) -> type[Any]:
    """A class as `model` that finds its weights under the names that they have, and takes no others."""

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
