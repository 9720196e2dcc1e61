"""From the name that a client sends to a model: an exact name, then an alias, then the most specific pattern."""

from collections.abc import Mapping

from gateway.caller import Caller
from gateway.config import ModelConfig
from gateway.errors import ModelNotFound
from gateway.patterns import Pattern


class Router:
    """The names of one configuration."""

    def __init__(self, models: Mapping[str, ModelConfig]) -> None:
        self.models = models
        self._aliases: dict[str, ModelConfig] = {}
        patterns: list[tuple[Pattern, ModelConfig]] = []
        for model in models.values():
            for alias in model.aliases:
                if "*" in alias:
                    patterns.append((Pattern(alias), model))
                else:
                    self._aliases[alias] = model
        # The most specific first; then the order of the file.
        self._patterns = sorted(patterns, key=lambda item: item[0].specificity, reverse=True)

    def resolve(self, name: str, caller: Caller) -> ModelConfig:
        """The model behind `name`. Raises `ModelNotFound`, for a model that `caller` may not use just as for none."""
        model = self._find(name)
        if model is None or not caller.may_use(model):
            raise ModelNotFound(name, [known.name for known in caller.usable(self.models.values())])
        return model

    def _find(self, name: str) -> ModelConfig | None:
        model = self.models.get(name) or self._aliases.get(name)
        if model is None:
            model = next((candidate for pattern, candidate in self._patterns if pattern.matches(name)), None)
        return model
