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
    """Whether a `Host` header names this machine: a loopback name, or one of `names`, with any port."""
    name = _name_of(host).removesuffix(".")
    return bool(name) and (name in names or is_loopback(name.strip("[]")))


def is_address(host: str) -> bool:
    """Whether the `Host` header is an IP address, with or without a port, instead of a name."""
    try:
        ipaddress.ip_address(_name_of(host).strip("[]"))
    except ValueError:
        return False
    return True


def _name_of(host: str) -> str:
    """Return the name or address in a `Host` header, without its port; empty if the header is invalid."""
    match = _HOST.fullmatch(host.strip().lower())
    return match[1] if match else ""


def invalid_host_reason(host: str) -> str | None:
    """Return what is wrong with a name in `[server] hosts`; None if it is valid."""
    if "*" in host:
        return "must not contain '*': list the names"
    if not _HOST_NAME.fullmatch(host):
        return "is not a host; write it like studio.local, in lower case, without scheme, port and path"
    return None


def is_own(origin: str) -> bool:
    """Whether an origin is a page on this machine, an app or an extension."""
    try:
        parts = urlsplit(origin)
        host = parts.hostname
    except ValueError:
        return False
    if parts.scheme in ("http", "https"):
        return host is not None and is_loopback(host)
    # The origin `null`, which pages in sandboxed frames send, has no scheme.
    return bool(parts.scheme)


def is_same(origin: str, host: str) -> bool:
    """Whether an origin has exactly the host and port of a `Host` header."""
    scheme, _, rest = origin.partition("://")
    return bool(rest) and scheme.lower() in _DEFAULT_PORTS and rest.lower() == host.strip().lower()


def invalid_origin_reason(origin: str) -> str | None:
    """Return what is wrong with an origin in the configuration; None if it is valid."""
    if "*" in origin:
        return "must not contain '*': list the origins"
    if not _ORIGIN.fullmatch(origin):
        return "is not an origin; write it like https://app.example.com, in lower case and without a path"
    default_port = _DEFAULT_PORTS.get(origin.partition(":")[0])
    if default_port is not None and origin.endswith(default_port):
        return f"names the port {default_port[1:]}, which browsers leave out"
    return None
