"""Loader of mlx-lm's text model from a vision checkpoint, regardless of weight names and other contents of the
checkpoint.
"""

from pathlib import Path
from typing import Any, Final

from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes, load_model  # pyright: ignore[reportPrivateUsage]  # as load_model itself does

from worker.vision.checkpoint import known_weights, text_names

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
