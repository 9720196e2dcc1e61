"""Hosts and web origins that belong to this machine, and their syntax in the configuration."""

import ipaddress
import re
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

# An origin is scheme://host:port, or the scheme and id of an extension or desktop app; it has no path and no user.
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~\[\]:-]+")
# A Host header is a name or an address with an optional port (RFC 9110).
_HOST: Final = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._~-]+)(?::[0-9]{0,5})?")
_HOST_NAME: Final = re.compile(r"\[[0-9a-f:.]+\]|[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_DEFAULT_PORTS: Final = {"http": ":80", "https": ":443"}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_served(host: str, names: Collection[str]) -> bool:
    """Whether a `Host` header names this machine: its loopback, or one of `names`, with any port."""
    name = _name_of(host).removesuffix(".")
    return bool(name) and (name in names or is_loopback(name.strip("[]")))


def is_address(host: str) -> bool:
    """Whether a `Host` header is an IP address, with any port, and no name."""
    try:
        ipaddress.ip_address(_name_of(host).strip("[]"))
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Return the name or address in a `Host` header, without its port; empty if the header is invalid."""
    match = _HOST.fullmatch(host.strip().lower())
    return match[1] if match else ""


def bad_host(host: str) -> str | None:
    """Return the error of a name in `[server] hosts`, if any."""
    if "*" in host:
        return "must not contain '*': list the names"
    if not _HOST_NAME.fullmatch(host):
        return "is not a host; write it like studio.local, in lower case, without scheme, port and path"
    return None


def is_own(origin: str) -> bool:
    """Whether an origin is a page of this machine, or an app or extension instead of a page."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme in ("http", "https"):
        return host is not None and is_loopback(host)
    # Pages in sandboxed frames send `null`.
    return bool(parts.scheme)


def is_same(origin: str, host: str) -> bool:
    """Whether an origin is the very host and port that a `Host` header names."""
    scheme, _, rest = origin.partition("://")
    return bool(rest) and scheme.lower() in _DEFAULT_PORTS and rest.lower() == host.strip().lower()


def bad_origin(origin: str) -> str | None:
    """Return the error of an origin in the configuration, if any."""
    if "*" in origin:
        return "must not contain '*': list the origins"
    if not _ORIGIN.fullmatch(origin):
        return "is not an origin; write it like https://app.example.com, in lower case and without a path"
    default_port = _DEFAULT_PORTS.get(origin.partition(":")[0])
    if default_port is not None and origin.endswith(default_port):
        return f"names the port {default_port[1:]}, which browsers leave out"
    return None
