"""Valid API keys, each with the caller that it authenticates.

Addresses from which API keys are used. The audit log has the first use of each key from each address, and is read at
the start.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from gateway.access.audit_log import AuditActor, AuditEntry, AuditTrail, entry
from gateway.access.caller import OWNER, Caller, tenant_of
from gateway.access.key import PREFIX_CHARS, SECRET_CHARS_MAX, Key, KeyFile, KeysUnusable, Stamp, digest
from gateway.access.ledger import Ledger
from gateway.access.rate_limit import Meter
from gateway.config.address import Address
from gateway.config.names import Pattern
from gateway.errors import Unauthorized
from gateway.telemetry.logs import last_lines
from gateway.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

# Maximum number of addresses recorded for one secret, so that its holder cannot fill the audit log.
ADDRESSES_MAX: Final = 256
# Maximum number of lines of the audit log that are read at the start.
_LINES_MAX: Final = 100_000

_decoder = msgspec.json.Decoder(AuditEntry)


class KeyAddresses:
    """Addresses from which keys are used. They are stored by the secret's prefix, so that a new secret starts without
    any.

    Used on the event loop only.
    """

    def __init__(self, trail: AuditTrail, path: Path, prefixes: Collection[str]) -> None:
        """`path` is the audit log; `prefixes` are the prefixes of the valid keys' secrets."""
        self._trail = trail
        self._seen: defaultdict[str, set[str]] = defaultdict(set)
        for line in _lines(path):
            try:
                event = _decoder.decode(line)
                network = Address(event.client).network
            except (msgspec.DecodeError, ValueError):
                continue
            prefix = event.facts.get("prefix")
            if isinstance(prefix, str) and prefix in prefixes:
                self._seen[prefix].add(network)

    def use(self, key: str, prefix: str, address: Address) -> None:
        """Record a use of a key in the audit log if it is the key's first use from this address."""
        seen = self._seen[prefix]
        network = address.network
        if network in seen or not address.host or len(seen) > ADDRESSES_MAX:
            return
        seen.add(network)
        if len(seen) > ADDRESSES_MAX:
            log.warning("key %s is used from more than %d addresses: further ones are not recorded", key, ADDRESSES_MAX)
            return
        self._trail.record(entry("key.address", key, client=address.host, actor=AuditActor(), facts={"prefix": prefix}))


def _lines(path: Path) -> list[str]:
    try:
        return last_lines(path, _LINES_MAX, lambda line: '"key.address"' in line)
    except OSError as error:
        log.error("%s cannot be read, so known addresses of keys are recorded again: %s", path, error.strerror or error)
        return []


# Percent of a model's queue that a key may fill while there are other keys, unless the key has a limit of its own.
KEY_QUEUE_PERCENT: Final = 50
INVALID: Final = "invalid_api_key"
EXPIRED: Final = "expired_api_key"
DISABLED: Final = "disabled_api_key"
_NO_SALT: Final = "00" * 16
UNKNOWN: Final[Stamp] = (-1, -1, -1)


@dataclass(frozen=True, slots=True)
class Account:
    """A valid key with its caller."""

    key: Key
    caller: Caller


class Keyring:
    """Valid keys. The file's stamp is checked before each request, so a change applies to the next request.

    If the file becomes unreadable, the last keys that were read stay valid; if there are none, every request is
    refused.
    """

    def __init__(
        self,
        file: KeyFile,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        ledger: Ledger | None = None,
    ) -> None:
        """Read the keys. Raises `KeysUnusable`."""
        self._file = file
        self._ledger = ledger
        self._metrics = metrics
        self._clock = clock
        self._wall = wall
        self._stamp: Stamp | None = None
        self._by_prefix: dict[bytes, list[Account]] = {}
        # Meters are kept by name, so that a rotated or recreated key keeps its usage.
        self.meters: dict[str, Meter] = {}
        # Called with the owners of all keys whenever the keys were read.
        self.watchers: list[Callable[[frozenset[str]], None]] = []
        self.owners: frozenset[str] = frozenset()
        # `is_open` is true while no key was ever made.
        self.is_open = True
        # `has_others` is true if several keys may send requests.
        self.has_others = False
        self._apply(self._current_stamp())

    @property
    def prefixes(self) -> set[str]:
        """Prefixes of the secrets of all keys."""
        return {prefix.decode() for prefix in self._by_prefix}

    def refresh(self) -> None:
        """Load the file if it has changed."""
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        try:
            self._apply(stamp)
        except KeysUnusable as error:
            # The unreadable file may contain a key, so requests without a key are refused from now on.
            self.is_open = False
            log.error("API keys not reloaded, the previous ones stay in force: %s", error)

    def caller(self, secret: bytes) -> Caller | None:
        """Return the caller of a secret. Raises `Unauthorized` if its key has expired or is disabled."""
        account = self._account(secret)
        if account is None:
            return None
        if account.key.is_expired(self._wall()):
            self._metrics.key(account.key.name).rejections["expired"] += 1
            raise Unauthorized("This API key has expired.", EXPIRED)
        numbers = self._metrics.key(account.key.name)
        if not account.key.is_usable:
            numbers.rejections["disabled"] += 1
            raise Unauthorized("This API key is disabled.", DISABLED)
        numbers.last_used = self._wall()
        return account.caller

    def named(self, name: str | None, owner: str) -> Caller | None:
        """Return the caller of the key with this name that owns what `owner` has stored; a name of None means the
        operator. A resumed request of an earlier daemon has only the name of its key.
        """
        if name is None:
            return OWNER
        for accounts in self._by_prefix.values():
            for account in accounts:
                if account.key.name == name and account.key.owner == owner:
                    is_usable = account.key.is_usable and not account.key.is_expired(self._wall())
                    return account.caller if is_usable else None
        return None

    def _account(self, secret: bytes) -> Account | None:
        accounts = self._by_prefix.get(secret[:PREFIX_CHARS], ()) if len(secret) <= SECRET_CHARS_MAX else ()
        opened = [account for account in accounts if account.key.is_opened_by(secret)]
        if not accounts:
            # An unknown prefix must take as long as a known one, so a hash is computed here too.
            digest(_NO_SALT, secret[:SECRET_CHARS_MAX])
        return opened[0] if opened else None

    def _current_stamp(self) -> Stamp | None:
        try:
            return self._file.stamp()
        except OSError:
            return UNKNOWN  # Reading the file will report the error.

    def _apply(self, stamp: Stamp | None) -> None:
        # The stamp is stored first, so that an unusable file is logged once, not at each request.
        self._stamp = stamp
        keys = self._file.read()
        by_prefix: dict[bytes, list[Account]] = {}
        self.has_others = sum(key.is_usable and not key.is_metrics_only for key in keys) > 1
        for key in keys:
            by_prefix.setdefault(key.prefix.encode(), []).append(Account(key, self._make_caller(key)))
        self._by_prefix = by_prefix
        # What requests without a key have stored is the operator's.
        self.owners = frozenset({"", *(key.owner for key in keys)})
        for watch in self.watchers:
            watch(self.owners)
        self.is_open = stamp is None
        if stamp is None:
            return
        log.info("%d of %d API keys are in force", sum(key.is_usable for key in keys), len(keys))
        if unknown := self._file.unknown():
            log.warning("fields of the keys that another version of mlxd wrote are ignored: %s", ", ".join(unknown))
        for key in keys:
            if not key.is_usable and not key.is_disabled:
                log.warning("the key %s is not in force: it requires a later version of mlxd", key.name)

    def _make_caller(self, key: Key) -> Caller:
        meter = self.meters.get(key.name)
        if meter is None:
            meter = self.meters[key.name] = Meter(key.name, key, self._metrics.key(key.name), self._clock, self._ledger)
        else:
            meter.limit(key)
        return Caller(
            key.name,
            tuple(map(Pattern, key.models)) if key.models else None,
            key.is_admin,
            key.is_metrics_only,
            key.priority,
            key.cache_salt,
            meter,
            tenant_of(key.name),
            (key.queue_share or KEY_QUEUE_PERCENT) if self.has_others and not key.is_admin else 100,
            key.max_tokens,
            may_leave=key.may_leave,
            owner=key.owner,
        )
