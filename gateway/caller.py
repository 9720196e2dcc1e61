"""Who asks, once that is known: what every later part of a request may know about its key."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from gateway.config import ModelConfig
from gateway.limits import Meter
from gateway.patterns import Pattern
from protocol.messages import Generate


@dataclass(frozen=True, slots=True)
class Caller:
    """`key` is the name of the key, and the owner of what its requests leave behind; `models` None means all."""

    key: str | None = None
    models: tuple[Pattern, ...] | None = None
    is_admin: bool = False
    is_metrics_only: bool = False
    priority: int = 0
    cache_salt: str = ""
    meter: Meter | None = None

    def may_use(self, model: ModelConfig) -> bool:
        """Whether a pattern of the key matches the model's name or one of its aliases."""
        if self.is_metrics_only:
            return False
        if self.models is None:
            return True
        names = (model.name, *model.aliases)
        return any(pattern.matches(name) for pattern in self.models for name in names)

    def bind(self, generate: Generate) -> Generate:
        """A request under this key: its priority counts from the key's, and only downwards; it shares cached
        prefixes within the key, and within its own salt if it has one."""
        priority = generate.priority if self.key is None else self.priority + max(0, generate.priority)
        salt = f"{self.cache_salt}\0{generate.cache_salt}" if generate.cache_salt else self.cache_salt
        return structs.replace(generate, priority=priority, cache_salt=salt)

    def usable(self, models: Iterable[ModelConfig]) -> list[ModelConfig]:
        """Those that exist as far as this caller is concerned."""
        return [model for model in models if self.may_use(model)]


# Whoever can open the unix socket; and on the loopback everybody, as long as there is no key.
OWNER: Final = Caller(is_admin=True)
# Whoever shows no key at the few places that need none.
NOBODY: Final = Caller(models=())
