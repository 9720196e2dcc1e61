"""From the name that a client sends to a model: an exact name, then an alias, then the most specific pattern."""

from collections.abc import Mapping

from gateway.config import ModelConfig
from gateway.errors import ModelNotFound


class Router:
    """The names of one configuration."""

    def __init__(self, models: Mapping[str, ModelConfig]) -> None:
        self.models = models
        self._aliases: dict[str, ModelConfig] = {}
        patterns: list[tuple[list[str], ModelConfig]] = []
        for model in models.values():
            for alias in model.aliases:
                if "*" in alias:
                    patterns.append((alias.split("*"), model))
                else:
                    self._aliases[alias] = model
        # The longest literal prefix is the most specific; then the most literal text; then the order of the file.
        self._patterns = sorted(patterns, key=lambda item: (-len(item[0][0]), -sum(map(len, item[0]))))

    def resolve(self, name: str) -> ModelConfig:
        """The model behind `name`. Raises `ModelNotFound`."""
        model = self.models.get(name) or self._aliases.get(name)
        if model is not None:
            return model
        for pieces, candidate in self._patterns:
            if _matches(pieces, name):
                return candidate
        raise ModelNotFound(name, self.models)


def _matches(pieces: list[str], name: str) -> bool:
    """Whether `name` is `pieces` with anything in between: linear, so no pattern can make a request slow."""
    first, *middle, last = pieces
    end = len(name) - len(last)
    if end < len(first) or not name.startswith(first) or not name.endswith(last):
        return False
    start = len(first)
    for piece in middle:
        found = name.find(piece, start, end)
        if found < 0:
            return False
        start = found + len(piece)
    return True
