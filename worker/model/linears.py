"""Linear layers of a model by their paths, as they are before anything is wrapped around the modules over them."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

_LAYERS = "layers."


@dataclass(frozen=True, slots=True)
class LinearPlace:
    """A linear layer: its path, sizes of a token before and after it, and where it hangs."""

    path: str
    inputs: int
    outputs: int
    holder: Any
    key: str | int

    @property
    def is_head(self) -> bool:
        """Whether it is given the tokens whose logits are wanted, and no others."""
        return _LAYERS not in self.path and self.path.rpartition(".")[2] == "lm_head"


class Linears:
    """The linear layers of one model, found by the names that files give them."""

    def __init__(self, model: Any) -> None:
        self._places: dict[str, LinearPlace] = {}
        # By what follows the name of the text model inside, which differs between libraries; None for several.
        self._by_tail: dict[str, LinearPlace | None] = {}
        self._tables: set[str] = set()
        for path, module, holder, key in _walk(model):
            if isinstance(module, nn.Linear | nn.QuantizedLinear):
                place = self._places[path] = _place(path, module, holder, key)
                tail = _tail(path)
                self._by_tail[tail] = None if tail in self._by_tail else place
            elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding):
                self._tables.add(_tail(path))

    @property
    def places(self) -> list[LinearPlace]:
        return list(self._places.values())

    def find(self, name: str) -> LinearPlace | None:
        """The layer of this name, or of the same name inside of a text model that is called otherwise."""
        return self._places.get(name) or self._by_tail.get(_tail(name))

    def is_table(self, name: str) -> bool:
        """Whether the module of this name is a table of embeddings."""
        return _tail(name) in self._tables


def is_of_experts(name: str) -> bool:
    """Whether a name is of a mixture's experts, as mlx-lm's models or those of transformers call them."""
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
    """Each module below one, or below a list or table of some, with its path, and what holds it under which key."""
    items: Any = enumerate(holder) if isinstance(holder, list) else list(holder.items())
    for key, child in items:
        if str(key).startswith("_"):
            continue
        own = f"{path}.{key}" if path else str(key)
        if isinstance(child, nn.Module):
            yield own, child, holder, key
        if isinstance(child, nn.Module | dict | list):
            yield from _walk(child, own)
