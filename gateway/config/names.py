"""Names of models. A client's name is resolved to a model, with its adapter and the requested profile.

An exact name comes first, then an alias, then an adapter's name or `NAME:ADAPTER`, then `NAME:PROFILE`, where NAME is
any of these. Patterns come last; the most specific pattern has the longest text before its first `*`, then the most
text. `NAME:latest`, which Ollama's clients send, is NAME. `[server] small` has patterns of its own for the small models
of vendors; if one is as specific as a model's alias, the alias wins.

Patterns in which `*` stands for any text. They are used for aliases of models and for the models of a key.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest, ModelNotFound


class Pattern:
    """A pattern. Matching takes time linear in the name's length, so no pattern can make a request slow."""

    __slots__ = ("_pieces", "specificity", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self._pieces = text.split("*")
        # The pattern with the longest literal prefix is the most specific, then the one with the most literal text.
        self.specificity = (len(self._pieces[0]), sum(map(len, self._pieces)))

    def matches(self, name: str) -> bool:
        """Whether `name` equals the pattern with some text in place of each `*`."""
        if len(self._pieces) == 1:
            return name == self.text
        first, *middle, last = self._pieces
        end = len(name) - len(last)
        if end < len(first) or not name.startswith(first) or not name.endswith(last):
            return False
        start = len(first)
        for piece in middle:
            at = name.find(piece, start, end)
            if at < 0:
                return False
            start = at + len(piece)
        return True


# Claude Code, Codex and other clients request these models for background work: titles, summaries, topics.
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
# Ollama's clients append this tag to a name without one.
LATEST: Final = "latest"


@dataclass(frozen=True, slots=True)
class ResolvedName:
    """A model, with its adapter if the name includes one, and the requested profile, which is empty if there is none.

    The model may not have that profile.
    """

    model: ModelConfig
    profile: str = ""


class Names:
    """Lookup of the names of one configuration."""

    def __init__(self, models: Mapping[str, ModelConfig], default: str = "", small: str = "") -> None:
        """`default` and `small` are names that `find` resolves, or empty."""
        self._models = models
        self._aliases: dict[str, ModelConfig] = {}
        # Maps the names of adapters to the model with that adapter.
        self._adapted = {name: each for model in models.values() for each in model.adapted for name in each.names}
        patterns: list[tuple[Pattern, ResolvedName]] = []
        for model in models.values():
            for alias in model.aliases:
                if "*" in alias:
                    patterns.append((Pattern(alias), ResolvedName(model)))
                else:
                    self._aliases[alias] = model
        self._patterns = _ordered(patterns)
        self._default: ResolvedName | None = None
        chosen = self.find(small) if small else None
        self._default = self.find(default) if default else None
        if chosen is not None:
            self._patterns = _ordered([*patterns, *((Pattern(text), chosen) for text in SMALL)])

    def locate(self, name: str, may_use: Callable[[ModelConfig], bool] = lambda _: True) -> ResolvedName:
        """Resolve a client's `name` to a model that `may_use` allows, and a profile.

        Raises `ModelNotFound`, which is the same for an unknown and a forbidden model, and `BadRequest` if the name is
        missing.
        """
        match = self.find(name)
        if match is None and not name:
            raise BadRequest("Missing required parameter: 'model'.", "model", "missing_required_parameter")
        if match is None or not may_use(match.model):
            every = (each for model in self._models.values() for each in (model, *model.adapted))
            raise ModelNotFound(name, [known.full_name for known in every if may_use(known)])
        if match.profile and match.profile not in match.model.profiles:
            raise ModelNotFound(name, match.model.profiles, f"Profiles of {match.model.name}")
        return match

    def find(self, name: str) -> ResolvedName | None:
        """Resolve `name` without checking access."""
        if (model := self._exact(name)) is not None:
            return ResolvedName(model)
        if name in ("", DEFAULT) and self._default is not None:
            return self._default
        base, _, profile = name.rpartition(":")
        owner = self._exact(base)
        if owner is not None and profile == LATEST and LATEST not in owner.profiles:
            return ResolvedName(owner)
        if owner is not None and owner.profiles:
            return ResolvedName(owner, profile)
        by_pattern = self._by_pattern(base)
        if by_pattern is not None and profile in by_pattern.model.profiles:
            return ResolvedName(by_pattern.model, profile)
        if by_pattern is not None and profile in by_pattern.model.adapters and not by_pattern.model.adapter:
            return ResolvedName(structs.replace(by_pattern.model, adapter=profile), by_pattern.profile)
        return self._by_pattern(name)

    def _exact(self, name: str) -> ModelConfig | None:
        return self._models.get(name) or self._aliases.get(name) or self._adapted.get(name)

    def _by_pattern(self, name: str) -> ResolvedName | None:
        return next((found for pattern, found in self._patterns if pattern.matches(name)), None)


def _ordered(patterns: list[tuple[Pattern, ResolvedName]]) -> list[tuple[Pattern, ResolvedName]]:
    """Sort patterns by specificity, the most specific first. Equally specific patterns keep their order."""
    return sorted(patterns, key=lambda item: item[0].specificity, reverse=True)
