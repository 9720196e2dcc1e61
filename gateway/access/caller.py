"""Caller of a request, once it is known: all that later parts of the request may know about its key."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from gateway.access.rate_limit import Meter
from gateway.config.patterns import Pattern
from gateway.config.settings import ModelConfig
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
    # By which the worker lets keys take turns: a digest, for a worker need not know the names.
    tenant: str = ""
    # Percent of a model's queue that it may fill; 0 is as the server says, and 100 all of it.
    queue_share: int = 100
    # The longest answer; 0 is no limit.
    max_tokens: int = 0
    # Another mlxd, whose requests are served here and never sent on.
    is_peer: bool = False
    # Its requests may be sent to an upstream.
    may_leave: bool = False
    # It has neither a key nor a session.
    is_anonymous: bool = False

    def may_use(self, model: ModelConfig) -> bool:
        """Whether a pattern of the key matches a name of the model, or of the adapter of it that a request names.

        A key of the model has its adapters only where a pattern matches them too, and one of an adapter not the model.
        """
        if self.is_metrics_only:
            return False
        if self.models is None:
            return True
        return any(pattern.matches(name) for pattern in self.models for name in model.names)

    def bind(self, generate: Generate) -> Generate:
        """A request under this key: its priority counts from the key's, and only downwards; it shares cached
        prefixes within the key, and within its own salt if it has one; its answer ends where the key's must."""
        priority = generate.priority if self.key is None else self.priority + max(0, generate.priority)
        salt = f"{self.cache_salt}\0{generate.cache_salt}" if generate.cache_salt else self.cache_salt
        most = generate.max_tokens
        if self.max_tokens:
            most = self.max_tokens if most is None else min(most, self.max_tokens)
        return structs.replace(generate, priority=priority, cache_salt=salt, tenant=self.tenant, max_tokens=most)

    def usable(self, models: Iterable[ModelConfig]) -> list[ModelConfig]:
        """Those that exist as far as this caller is concerned."""
        return [model for model in models if self.may_use(model)]


def tenant_of(key: str) -> str:
    """The tenant of a key: its name, hashed, as workers see it."""
    return hashlib.blake2b(key.encode(), digest_size=8, person=b"mlxd-tenant").hexdigest()


# A client of the unix socket, and one with a session of the page.
OWNER: Final = Caller(is_admin=True, may_leave=True)
# Every other client on the loopback, as long as there is no key.
ANONYMOUS: Final = Caller(is_admin=True, may_leave=True, is_anonymous=True)
# A client without a key at the few places that need none.
NOBODY: Final = Caller(models=())
