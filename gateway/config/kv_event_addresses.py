"""Addresses at which a prefix cache may publish its events."""

import ipaddress
import re
from typing import Final

from gateway.config.settings import KvEventsConfig

_ADDRESS: Final = re.compile(r"tcp://(\*|[\w.:\[\]-]+):(\d{1,5})")


def bad_kv_events(config: KvEventsConfig) -> str:
    """Return the reason why events cannot be published under these settings; empty if they can."""
    if config.replay and not config.endpoint:
        return "replay: without an endpoint nothing is published"
    for key, address in (("endpoint", config.endpoint), ("replay", config.replay)):
        if not address:
            continue
        match = _ADDRESS.fullmatch(address)
        if match is None or not 0 < int(match[2]) < 1 << 16:
            return f"{key}: {address!r} is no address such as tcp://127.0.0.1:5557"
        if not _is_loopback(match[1]) and not config.plain:
            return f"{key}: events tell prompts to all that connect to {address}; plain = true allows it"
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
