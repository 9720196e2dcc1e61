"""Linear layers of a model by path, found before any module is wrapped."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

_LAYERS = "layers."


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """Linear layer of a model: its path, its input and output sizes, and the module that contains it."""

    path: str
    inputs: int
    outputs: int
    holder: Any
    key: str | int

    @property
    def is_head(self) -> bool:
        """Whether the layer is the head, which only gets the tokens whose logits are needed."""
        return _LAYERS not in self.path and self.path.rpartition(".")[2] == "lm_head"


class Linears:
    """Linear layers of one model, which are found by the names that files use."""

    def __init__(self, model: Any) -> None:
        self._places: dict[str, LinearPlace] = {}
        # Layers by their path inside the text model, whose own name differs between libraries; None for an ambiguous
        # path.
        self._by_tail: dict[str, LinearPlace | None] = {}
        self._tables: set[str] = set()
        for path, module, holder, key in _walk(model):
            if isinstance(module, nn.Linear | nn.QuantizedLinear):
                place = self._places[path] = _place(path, module, holder, key)
                tail = _tail(path)
                self._by_tail[tail] = None if tail in self._by_tail else place
            elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self._tables.add(_tail(path))

    def find(self, name: str) -> LinearPlace | None:
        """Return the layer with this name, or the layer whose name differs only in the name of the text model."""
        return self._places.get(name) or self._by_tail.get(_tail(name))

    def is_table(self, name: str) -> bool:
        """Whether this is the name of an embedding table."""
        return _tail(name) in self._tables


def is_of_experts(name: str) -> bool:
    """Whether a name belongs to a mixture's experts, in mlx-lm or in transformers."""
    parts = name.split(".")
    return "switch_mlp" in parts or "experts" in parts


def _place(path: str, module: Any, holder: Any, key: str | int) -> LinearPlace:
    outputs, inputs = module.weight.shape
    if isinstance(module, nn.QuantizedLinear):
        inputs = inputs * 32 // module.bits
    return LinearPlace(path, int(inputs), int(outputs), holder, key)


def _tail(path: str) -> str:
    at = path.find(_LAYERS)
    return path[at:] if at >= 0 else path.rpartition(".")[2]


def _walk(holder: Any, path: str = "") -> Iterator[tuple[str, Any, Any, str | int]]:
    """Yield all modules, including those in lists and dicts, with their path, container and key."""
    items: Any = enumerate(holder) if isinstance(holder, list) else list(holder.items())
    for key, child in items:
        if str(key).startswith("_"):
            continue
        own = f"{path}.{key}" if path else str(key)
        if isinstance(child, nn.Module):
            yield own, child, holder, key
        if isinstance(child, nn.Module | dict | list):
            yield from _walk(child, own)
