"""Which addresses and web origins are this machine's own, and how an origin is written."""

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

# scheme://host:port, or what extensions and desktop apps have; no path, no user.
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~\[\]:-]+")
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_own(origin: str) -> bool:
    """Whether it is a page of this machine, or no page at all but an app or an extension, that asks."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme in ("http", "https"):
        return host is not None and is_loopback(host)
    # `null` is what a page in a sandboxed frame is called.
    return bool(parts.scheme)


def bad_origin(origin: str) -> str | None:
    """What is wrong with an origin in the configuration."""
    if "*" in origin:
        return "must not contain '*': list the origins"
    if not _ORIGIN.fullmatch(origin):
        return "is not an origin; write it like https://app.example.com, in lower case and without a path"
    default_port = _DEFAULT_PORTS.get(origin.partition(":")[0])
    if default_port is not None and origin.endswith(default_port):
        return f"names the port {default_port[1:]}, which browsers leave out"
    return None
