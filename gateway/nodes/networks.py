"""Networks of a node: the addresses by which ranks reach each other, and whether plain traffic may cross them.

MLX's ring and the coordinators of JACCL and NCCL neither encrypt nor authenticate: the first connection wins. So ranks
talk over addresses that nobody else can reach: the loopback, a cable between two machines, or a VPN's interface.
"""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import psutil

from gateway.config.remote_settings import FabricConfig, NodeConfig
from protocol.collectives import SEPARATOR

# A network of two hosts.
CABLE_BITS: Final = 30
# Interfaces of VPNs by the beginnings of their names: WireGuard, and what macOS calls its tunnels.
TUNNELS: Final = ("wg", "utun", "tun", "tailscale")


@dataclass(frozen=True, slots=True)
class Interface:
    """One IPv4 address of this machine."""

    name: str
    ip: str
    netmask: str


def interfaces() -> list[Interface]:
    """All of this machine."""
    addresses = psutil.net_if_addrs()
    return [
        Interface(name, address.address, address.netmask or "255.255.255.255")
        for name, own in addresses.items()
        for address in own
        if _is_ipv4(address.address)
    ]


def exposure(ip: str, own: Iterable[Interface]) -> str:
    """The reason why plain traffic of this address of ours can be reached by others; empty where it cannot."""
    if ipaddress.IPv4Address(ip).is_loopback:
        return ""
    interface = next((each for each in own if each.ip == ip), None)
    if interface is None:
        return f"{ip} is no address of this machine"
    bits = ipaddress.IPv4Network((ip, interface.netmask), strict=False).prefixlen
    if interface.name.startswith(TUNNELS) or CABLE_BITS <= bits < 32:
        return ""
    return (
        f"{ip} ({interface.name}) is in a network of {1 << (32 - bits)} addresses, and what ranks say is neither "
        "encrypted nor authenticated: use addresses of a cable (/30) or of WireGuard, or set allow_plain_lan = true in "
        "[node]"
    )


def objection(ip: str, node: NodeConfig, own: Iterable[Interface]) -> str:
    """The reason why a rank on this node must not listen at an address; empty where it may."""
    try:
        ipaddress.IPv4Address(ip)
    except ValueError:
        return f"{ip!r} is no IPv4 address"
    known = list(own)
    is_allowed = node.allow_plain_lan and any(each.ip == ip for each in known)
    return "" if is_allowed else exposure(ip, known)


def trusted_ips(node: NodeConfig, own: Iterable[Interface]) -> tuple[str, ...]:
    """Addresses of this node that ranks may use, first the loopback."""
    known = list(own)
    return tuple(ip for ip in ("127.0.0.1", *node.fabric.ips) if not objection(ip, node, known))


def device(fabric: FabricConfig, towards: str) -> str:
    """The RDMA device towards a node, several with commas between them; empty for none."""
    devices = fabric.rdma.get(towards, "")
    return devices if isinstance(devices, str) else SEPARATOR.join(devices)


def _is_ipv4(address: str) -> bool:
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        return False
    return True
