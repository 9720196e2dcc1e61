"""Caller of an authenticated request, with its key's rights and limits."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from gateway.access.rate_limit import Meter
from gateway.config.patterns import Pattern
from gateway.config.settings import ModelConfig
from protocol.to_worker import Generate


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. `key` is the name of its key, which owns what its requests store; `models` None means all."""

    key: str | None = None
    models: tuple[Pattern, ...] | None = None
    is_admin: bool = False
    is_metrics_only: bool = False
    priority: int = 0
    cache_salt: str = ""
    meter: Meter | None = None
    # The digest of the key's name, by which the worker lets keys take turns without knowing them.
    tenant: str = ""
    # Percent of a model's queue that the key may fill; 0 uses the server's setting, and 100 is the whole queue.
    queue_share: int = 100
    # Maximum tokens of an answer; 0 is no limit.
    max_tokens: int = 0
    # The caller is another mlxd, whose requests are served here and never forwarded.
    is_peer: bool = False
    # Requests may be sent to an upstream.
    may_leave: bool = False
    # The caller has neither a key nor a session.
    is_anonymous: bool = False

    def may_use(self, model: ModelConfig) -> bool:
        """Whether a pattern of the key matches a name of the model, or of the requested adapter.

        A key for a model has its adapters only if a pattern matches them too, and a key for an adapter lacks the model.
        """
        if self.is_metrics_only:
            return False
        if self.models is None:
            return True
        return any(pattern.matches(name) for pattern in self.models for name in model.names)

    def bind(self, generate: Generate) -> Generate:
        """Apply the key to a request. A request can only lower its key's priority. Cached prefixes are shared within
        the key, and within the request's own salt if it has one. The key's limit bounds the answer."""
        priority = generate.priority if self.key is None else self.priority + max(0, generate.priority)
        salt = f"{self.cache_salt}\0{generate.cache_salt}" if generate.cache_salt else self.cache_salt
        max_tokens = generate.max_tokens
        if self.max_tokens:
            max_tokens = self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        return structs.replace(generate, priority=priority, cache_salt=salt, tenant=self.tenant, max_tokens=max_tokens)

    def usable(self, models: Iterable[ModelConfig]) -> list[ModelConfig]:
        """Return the models that exist for this caller."""
        return [model for model in models if self.may_use(model)]


def tenant_of(key: str) -> str:
    """Return the tenant of a key: its name, hashed, as workers see it."""
    return hashlib.blake2b(key.encode(), digest_size=8, person=b"mlxd-tenant").hexdigest()


# A client of the unix socket, or with a session of the page, is the owner.
OWNER: Final = Caller(is_admin=True, may_leave=True)
# Other clients on the loopback are anonymous owners as long as there is no key.
ANONYMOUS: Final = Caller(is_admin=True, may_leave=True, is_anonymous=True)
# The caller of endpoints that need no key, when there is none.
NOBODY: Final = Caller(models=())
