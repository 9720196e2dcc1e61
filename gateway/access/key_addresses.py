"""Addresses from which API keys are used. The audit log has the first use of each key from each address, and is read at
the start.
"""

import logging
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path
from typing import Final

import msgspec

from gateway.access.audit_log import AuditActor, AuditEntry, entry
from gateway.access.audit_trail import AuditTrail
from gateway.config.address import Address
from gateway.telemetry.log_file import last_lines

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
