"""Addresses of clients, taken from the connection or from a trusted proxy's `X-Forwarded-For`."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network
from typing import Final

from starlette.types import Scope

FORWARDED: Final = b"x-forwarded-for"
# Maximum number of consecutive proxies of a header that are followed.
HOPS_MAX: Final = 16
# An IPv6 provider assigns a prefix of this length to each customer.
_CUSTOMER_BITS: Final = 64
_WITH_PORT: Final = re.compile(r"\[([0-9A-Fa-f:.]+)\](?::[0-9]{1,5})?|([0-9.]+):[0-9]{1,5}")
# A proxy may serve mlxd below a path, so a path is allowed. No allowed character is special in clients' settings files.
_DAEMON_URL: Final = re.compile(r"https?://[A-Za-z0-9._~\[\]:-]{1,255}(?:/[A-Za-z0-9._~/-]{0,200})?")


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a client. `host` is an IP address, `unix`, or empty if unknown. A forwarded address has no port.

    `is_hidden` means that `host` is a trusted proxy, whose header gives no address of the client.
    """

    host: str
    port: int | None = None
    is_forwarded: bool = False
    is_hidden: bool = False

    def __str__(self) -> str:
        if self.port is None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def network(self) -> str:
        """Return the network that identifies a client: the IPv4 address, or the IPv6 prefix of one customer."""
        if ":" not in self.host:
            return self.host
        address = IPv6Address(self.host.partition("%")[0])
        return str(IPv6Network((int(address), _CUSTOMER_BITS), strict=False))

    @property
    def is_own(self) -> bool:
        """Whether the address is that of the connection itself, or a loopback address that a proxy reported."""
        return not self.is_hidden and (not self.is_forwarded or self.is_loopback)

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


UNIX: Final = Address("unix")
UNKNOWN: Final = Address("")


class Proxies:
    """Trusted proxies: `[server] trusted_proxies`."""

    def __init__(self, addresses: Iterable[str]) -> None:
        """Parse addresses or networks. Raises ValueError."""
        self._networks = tuple(ipaddress.ip_network(address) for address in addresses)

    def client(self, scope: Scope) -> Address:
        """Return the client of a request: the connected peer or, if that is a trusted proxy, the last address before
        the proxies.

        Headers of untrusted peers are ignored. The client is hidden if the header has a value that is no address.
        """
        peer = scope.get("client")
        if peer is None:
            return UNKNOWN
        address = Address(peer[0], peer[1])
        if not self._networks or not self.trusts(address.host):
            return address
        for hop in _last_hops(scope):
            host = _ip(hop)
            if host is None:
                return Address(address.host, address.port, is_hidden=True)
            if not self.trusts(host):
                return Address(host, is_forwarded=True)
        return address

    def trusts(self, host: str) -> bool:
        """Whether a host is a trusted proxy."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def from_here(url: str) -> str:
    """Rewrite a URL for programs on this machine: a wildcard address, to which nothing can connect, becomes the
    loopback.
    """
    for every in ("//0.0.0.0:", "//[::]:"):
        url = url.replace(every, "//127.0.0.1:")
    return url


def invalid_proxy_reason(address: str) -> str | None:
    """Return what is wrong with an address in `[server] trusted_proxies`; None if it is valid."""
    try:
        ipaddress.ip_network(address)
    except ValueError:
        return "is neither an address like 127.0.0.1 nor a network like 10.0.0.0/8"
    return None


def _last_hops(scope: Scope) -> list[str]:
    """List the client addresses that the proxies report, the nearest first."""
    lines = [value for name, value in scope["headers"] if name == FORWARDED]
    if not lines:
        return []
    hops = b",".join(lines).decode("latin-1").rsplit(",", HOPS_MAX)[-HOPS_MAX:]
    return [hop.strip() for hop in reversed(hops)]


def _ip(hop: str) -> str | None:
    """Parse the address of a hop; None if it is invalid. Some proxies write it with its port."""
    match = _WITH_PORT.fullmatch(hop)
    try:
        address = ipaddress.ip_address(hop if match is None else match[1] or match[2])
    except ValueError:
        return None
    if isinstance(address, IPv6Address):
        if address.scope_id is not None:
            return None
        return str(address.ipv4_mapped or address)
    return str(address)


def is_daemon_url(text: str) -> bool:
    """Whether a text can be the URL of a daemon in a client's settings."""
    return _DAEMON_URL.fullmatch(text) is not None
