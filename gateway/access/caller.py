"""Caller of an authenticated request, with its key's rights and limits."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from gateway.access.rate_limit import Meter
from gateway.config.names import Pattern
from gateway.config.settings import ModelConfig
from protocol.to_worker import BATCH_PRIORITY, Generate


@dataclass(frozen=True, slots=True)
class Caller:
    """A caller. `key` is the name of its API key, and `owner` owns what its requests store. `models` None means all
    models.
    """

    key: str | None = None
    models: tuple[Pattern, ...] | None = None
    is_admin: bool = False
    is_metrics_only: bool = False
    priority: int = 0
    cache_salt: str = ""
    meter: Meter | None = None
    # `tenant` is a digest of the key's name. The worker uses it to let keys take turns, without learning their names.
    tenant: str = ""
    # Percent of a model's queue that the key may fill.
    queue_quota_percent: int = 100
    # Maximum tokens of an answer; 0 means no limit.
    max_tokens: int = 0
    # `may_leave` allows requests to be sent to an upstream.
    may_leave: bool = False
    # `is_anonymous` means that the caller has neither a key nor a session.
    is_anonymous: bool = False
    owner: str = ""
    # `is_batch` means that the request belongs to a batch. It has no deadline, and runs below all other requests.
    is_batch: bool = False

    def may_use(self, model: ModelConfig) -> bool:
        """Whether the key allows the model, or the adapter that the request names.

        A key for a model may use the model's adapters only if its patterns match them too. A key for an adapter may not
        use the model without the adapter.
        """
        if self.is_metrics_only:
            return False
        if self.models is None:
            return True
        return any(pattern.matches(name) for pattern in self.models for name in model.names)

    def bind(self, generate: Generate) -> Generate:
        """Apply the key's rights and limits to a request. A request can only lower its key's priority, and the key's
        limit bounds the answer. Cached prefixes are shared only within the key, and within the request's own salt if it
        has one.
        """
        priority = generate.priority if self.key is None else self.priority + max(0, generate.priority)
        deadline_ms = 0 if self.is_batch else generate.deadline_ms
        if self.is_batch or is_of_batch_class(generate):
            priority = BATCH_PRIORITY
        salt = f"{self.cache_salt}\0{generate.cache_salt}" if generate.cache_salt else self.cache_salt
        max_tokens = generate.max_tokens
        if self.max_tokens:
            max_tokens = self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens)
        return structs.replace(
            generate,
            priority=priority,
            cache_salt=salt,
            tenant=self.tenant,
            max_tokens=max_tokens,
            deadline_ms=deadline_ms,
        )

    def usable(self, models: Iterable[ModelConfig]) -> list[ModelConfig]:
        """Return the models that this caller may use."""
        return [model for model in models if self.may_use(model)]


def is_of_batch_class(generate: Generate) -> bool:
    """Whether a request runs only while its model has no other request."""
    return generate.priority >= BATCH_PRIORITY


def tenant_of(key: str) -> str:
    """Return the hash of a key's name, by which workers tell keys apart."""
    return hashlib.blake2b(key.encode(), digest_size=8, person=b"mlxd-tenant").hexdigest()


# A client of the unix socket, or with a session of the web page, is the owner.
OWNER: Final = Caller(is_admin=True, may_leave=True)
# While there is no key, every other client on the loopback is an anonymous owner.
ANONYMOUS: Final = Caller(is_admin=True, may_leave=True, is_anonymous=True)
# Endpoints that need no key have this caller for a request without one.
NOBODY: Final = Caller(models=())
