"""API key: its limits, its rights and the hash of its secret."""

import hashlib
import hmac
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

Limit = Annotated[int, Meta(ge=0, le=10**12)]
Percent = Annotated[int, Meta(ge=0, le=100)]
# A date of the year 5138: no table has room for the digits of much later ones.
EXPIRY_MAX_S: Final = 1e11
# Seconds since 1970.
Expiry = Annotated[float, Meta(ge=0, le=EXPIRY_MAX_S)]


class Key(Struct, frozen=True, kw_only=True):
    """One key. `models` empty means all; limits of 0 mean none; times are seconds since 1970.

    A request is counted as its sequences: prompts times choices. Requests of a lower `priority` run first. `cache_salt`
    keeps the prefix cache of one key from the others, who could otherwise tell by the time of an answer what has been
    asked before; empty means the common cache.

    Fields that a later mlxd has written are ignored here and kept on every change. Where ignoring one would let the key
    do more than it may, that mlxd names it in `requires`: a key that requires what is unknown here opens nothing.
    """

    name: str
    prefix: str
    salt: str
    hash: str
    models: tuple[str, ...] = ()
    rpm: Limit = 0
    tpm: Limit = 0
    concurrency: Limit = 0
    expires: float | None = None
    is_admin: bool = False
    # May read `/metrics`, and nothing else.
    is_metrics_only: bool = False
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    cache_salt: str = ""
    created: float = 0.0
    is_disabled: bool = False
    # Sequences of one request, and tokens of one answer.
    max_sequences: Limit = 0
    max_tokens: Limit = 0
    # How much of a model's queue the key may fill while there are others, in percent; 0 is the server's.
    queue_share: Percent = 0
    requests_per_day: Limit = 0
    tokens_per_day: Limit = 0
    requests_per_month: Limit = 0
    tokens_per_month: Limit = 0
    # The part of a day's or a month's budget, in percent, from which on its use is told; 0 is never.
    alert_at: Percent = 80
    # Of another mlxd that sends requests of its clients here: opens `/internal/`, and nothing else.
    is_peer: bool = False
    # Whether its requests may leave for an upstream where a model's do.
    may_leave: bool = False
    # Names of fields without which the key must not be used.
    requires: tuple[str, ...] = ()

    def is_expired(self, now: float) -> bool:
        return self.expires is not None and now >= self.expires

    @property
    def is_usable(self) -> bool:
        """Whether it opens anything, its expiry aside."""
        return not self.is_disabled and KNOWN.issuperset(self.requires)

    @property
    def role(self) -> Literal["user", "admin", "metrics", "peer"]:
        return "admin" if self.is_admin else "metrics" if self.is_metrics_only else "peer" if self.is_peer else "user"

    @property
    def is_limited(self) -> bool:
        return any(getattr(self, name) for name in LIMITS)

    def is_opened_by(self, secret: bytes) -> bool:
        """Whether this is the key's secret; takes the same time whatever the answer."""
        return hmac.compare_digest(digest(self.salt, secret), self.hash)


# Fields that this version knows.
KNOWN: Final = frozenset(Key.__struct_fields__)
# What an admin key has none of.
LIMITS: Final = (
    "rpm",
    "tpm",
    "concurrency",
    "max_sequences",
    "max_tokens",
    "queue_share",
    "requests_per_day",
    "tokens_per_day",
    "requests_per_month",
    "tokens_per_month",
)


def digest(salt: str, secret: bytes) -> str:
    return hashlib.blake2b(secret, digest_size=32, salt=bytes.fromhex(salt), person=b"mlxd-key").hexdigest()
