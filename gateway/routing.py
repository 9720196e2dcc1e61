"""From the name that a client sends to a model, with what a profile and the model's own files say about its defaults.

An exact name, then an alias, then `NAME:PROFILE` of either, then the most specific pattern: the longest text before
its first `*`, then the most text. `[server] small` has patterns of its own for the small models of vendors; where one
is as specific as a model's alias, the alias wins.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gateway.caller import Caller
from gateway.config import Config, ModelConfig
from gateway.defaults import Defaults
from gateway.errors import BadRequest, ModelNotFound
from gateway.patterns import Pattern

# What Claude Code, Codex and others ask for in the background: titles, summaries, topics.
SMALL: Final = (
    "claude-haiku-*",
    "claude-*-haiku",
    "claude-*-haiku-*",
    "gpt-*-mini",
    "gpt-*-mini-*",
    "gpt-*-nano",
    "gpt-*-nano-*",
)
DEFAULT: Final = "default"


@dataclass(frozen=True, slots=True)
class Found:
    """A model and the profile it was asked for with, empty without one. The profile may not exist."""

    model: ModelConfig
    profile: str = ""


class Router:
    """The names of one configuration."""

    def __init__(self, models: Mapping[str, ModelConfig], default: str = "", small: str = "") -> None:
        """`default` and `small` are names that `find` finds, or empty."""
        self._models = models
        self._defaults = Defaults()
        self._aliases: dict[str, ModelConfig] = {}
        patterns: list[tuple[Pattern, Found]] = []
        for model in models.values():
            for alias in model.aliases:
                if "*" in alias:
                    patterns.append((Pattern(alias), Found(model)))
                else:
                    self._aliases[alias] = model
        self._patterns = _ordered(patterns)
        self._default: Found | None = None
        chosen = self.find(small) if small else None
        self._default = self.find(default) if default else None
        if chosen is not None:
            self._patterns = _ordered([*patterns, *((Pattern(text), chosen) for text in SMALL)])

    @classmethod
    def of(cls, config: Config) -> "Router":
        return cls(config.models, config.server.default, config.server.small)

    def resolve(self, name: str, caller: Caller) -> ModelConfig:
        """The model behind `name`, its defaults filled in from the profile and the model's own files.

        Raises `ModelNotFound`, for a model that `caller` may not use just as for none, and `BadRequest` without a name.
        """
        found = self.locate(name, caller)
        return self._defaults.of(found.model, found.profile)

    def locate(self, name: str, caller: Caller) -> Found:
        """Like `resolve`, with the model as it is configured."""
        found = self.find(name)
        if found is None and not name:
            raise BadRequest("Missing required parameter: 'model'.", "model", "missing_required_parameter")
        if found is None or not caller.may_use(found.model):
            raise ModelNotFound(name, [known.name for known in caller.usable(self._models.values())])
        if found.profile and found.profile not in found.model.profiles:
            raise ModelNotFound(name, found.model.profiles, f"Profiles of {found.model.name}")
        return found

    def find(self, name: str) -> Found | None:
        """Who is asked for by `name`, whoever asks."""
        if (model := self._exact(name)) is not None:
            return Found(model)
        if name in ("", DEFAULT) and self._default is not None:
            return self._default
        base, _, profile = name.rpartition(":")
        owner = self._exact(base)
        if owner is not None and owner.profiles:
            return Found(owner, profile)
        by_pattern = self._by_pattern(base)
        if by_pattern is not None and profile in by_pattern.model.profiles:
            return Found(by_pattern.model, profile)
        return self._by_pattern(name)

    def _exact(self, name: str) -> ModelConfig | None:
        return self._models.get(name) or self._aliases.get(name)

    def _by_pattern(self, name: str) -> Found | None:
        return next((found for pattern, found in self._patterns if pattern.matches(name)), None)


def _ordered(patterns: list[tuple[Pattern, Found]]) -> list[tuple[Pattern, Found]]:
    """The most specific first; then the order in which they came."""
    return sorted(patterns, key=lambda item: item[0].specificity, reverse=True)
