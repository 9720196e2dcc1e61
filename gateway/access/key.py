"""API key with its limits, its rights and the hash of its secret."""

import hashlib
import hmac
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Limit = Annotated[int, Meta(ge=0, le=10**12)]
Percent = Annotated[int, Meta(ge=0, le=100)]
# The limit is in the year 5138; tables have no room for the digits of much later dates.
EXPIRY_MAX_S: Final = 1e11
# Expiry is a Unix time.
Expiry = Annotated[float, Meta(ge=0, le=EXPIRY_MAX_S)]


class KeyLimits(Struct, frozen=True, kw_only=True):
    """Limits of a key; 0 means no limit. A request counts as its number of sequences: prompts times choices."""

    rpm: Limit = 0
    tpm: Limit = 0
    concurrency: Limit = 0
    # Maximum sequences of one request, and maximum tokens of one answer.
    max_sequences: Limit = 0
    max_tokens: Limit = 0
    # Percent of a model's queue that the key may fill while there are other keys; 0 means the default.
    queue_share: Percent = 0
    requests_per_day: Limit = 0
    tokens_per_day: Limit = 0
    requests_per_month: Limit = 0
    tokens_per_month: Limit = 0
    # A daily or monthly budget is logged once this percentage is used; 0 logs only a spent budget.
    alert_at: Percent = 80

    @property
    def is_limited(self) -> bool:
        return any(getattr(self, name) for name in _LIMITS)


_LIMITS: Final = frozenset(KeyLimits.__struct_fields__) - {"alert_at"}


class Key(KeyLimits, frozen=True, kw_only=True):
    """One API key. Empty `models` means all models; times are Unix times.

    Requests of a lower `priority` run first. `cache_salt` separates the key's prefix cache from other keys', who could
    otherwise infer earlier prompts from response times. An empty salt means the common cache.

    Fields of a later mlxd are ignored here and preserved by every change. If ignoring a field would extend a key's
    rights, that mlxd lists it in `requires`: a key that requires an unknown field grants nothing.
    """

    name: str
    prefix: str
    salt: str
    hash: str
    models: tuple[str, ...] = ()
    expires: float | None = None
    is_admin: bool = False
    # A metrics key may read `/metrics` and nothing else.
    is_metrics_only: bool = False
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    cache_salt: str = ""
    created: float = 0.0
    is_disabled: bool = False
    # Whether the key's requests may be sent to an upstream if their model allows it.
    may_leave: bool = False
    # Random id under which the key's requests store responses, batches and files. A key of an earlier version has none.
    id: str = ""
    # Names of fields that a mlxd must know to accept this key.
    requires: tuple[str, ...] = ()

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    @property
    def owner(self) -> str:
        """Owner of what the key's requests store. A key that gets a revoked key's name is another owner."""
        return self.id or self.name

    @property
    def is_usable(self) -> bool:
        """Whether the key grants anything. Does not check its expiry."""
        return not self.is_disabled and KNOWN.issuperset(self.requires)

    @property
    def role(self) -> Literal["user", "admin", "metrics"]:
        return "admin" if self.is_admin else "metrics" if self.is_metrics_only else "user"

    def is_opened_by(self, secret: bytes) -> bool:
        """Whether `secret` is the key's secret, compared in constant time."""
        return hmac.compare_digest(digest(self.salt, secret), self.hash)


# Names of the fields that this version knows.
KNOWN: Final = frozenset(Key.__struct_fields__)


def digest(salt: str, secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=32, salt=bytes.fromhex(salt), person=b"mlxd-key").hexdigest()
