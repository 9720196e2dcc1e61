"""Environments of MLX's distributed backends: the variables and files that each rank of a group needs before `init`.

The names are those of MLX's own launcher. JACCL and NCCL were not run here; the tests compare their environments with
those that mlx.launch sets.
"""

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

# All variables that the backends read. Inherited ones are cleared, because JACCL_* even overrides MLX_*.
VARIABLES: Final = (
    "MLX_RANK",
    "MLX_HOSTFILE",
    "MLX_WORLD_SIZE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_COORDINATOR",
    "MLX_JACCL_RING",
    "JACCL_RANK",
    "JACCL_IBV_DEVICES",
    "JACCL_COORDINATOR",
    "JACCL_RING",
    "NCCL_HOST_IP",
    "NCCL_PORT",
)
BACKENDS: Final = ("ring", "jaccl", "nccl")
# Maximum number of machines that are all cabled to each other.
MESH_MAX: Final = 8
# Separator between the devices of one link.
SEPARATOR: Final = ","


class CannotConnect(ValueError):
    """Raised with the operator's reason when the ranks cannot be connected as described."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment variables of one rank.

    `files` maps a variable to the content of the file whose path the variable holds. All other `VARIABLES` must be
    unset.
    """

    variables: dict[str, str]
    files: dict[str, str] = field(default_factory=dict[str, str])


def environment(
    backend: str,
    rank: int,
    size: int,
    *,
    links: Sequence[Sequence[str]] = (),
    devices: Sequence[Sequence[str]] = (),
    coordinator: str = "",
) -> Environment:
    """Return the environment of one rank. Raises `CannotConnect`.

    `links` are addresses `ip:port` by rank, several per rank for parallel links. `devices` has a list for each rank,
    with its RDMA device towards each other rank; an empty entry means no device. `coordinator` is `ip:port` of rank 0.
    """
    if not 0 <= rank < size:
        raise CannotConnect(f"rank {rank} of {size}")
    own = {"MLX_RANK": str(rank)}
    match backend:
        case "ring":
            _check_links(links, size)
            return Environment(own, {"MLX_HOSTFILE": json.dumps([list(each) for each in links])})
        case "jaccl":
            _check_address(coordinator, "the coordinator")
            variables = own | {"MLX_JACCL_COORDINATOR": coordinator}
            if not has_mesh(devices, size):
                if reason := broken_ring_reason(devices, size):
                    raise CannotConnect(reason)
                variables |= {"MLX_JACCL_RING": "1"}
            return Environment(variables, {"MLX_IBV_DEVICES": json.dumps(_matrix(devices))})
        case "nccl":
            ip, port = _check_address(coordinator, "the coordinator")
            return Environment(own | {"MLX_WORLD_SIZE": str(size), "NCCL_HOST_IP": ip, "NCCL_PORT": str(port)})
        case _:
            raise CannotConnect(f"backend '{backend}' is none of {', '.join(BACKENDS)}")


def has_mesh(devices: Sequence[Sequence[str]], size: int) -> bool:
    """Whether every two ranks are cabled to each other, in both directions."""
    pairs = [(one, other) for one in range(size) for other in range(size) if one != other]
    return 1 < size <= MESH_MAX and _is_square(devices, size) and all(devices[one][other] for one, other in pairs)


def broken_ring_reason(devices: Sequence[Sequence[str]], size: int) -> str:
    """Return the reason why JACCL cannot even form a ring of these devices; empty if it can."""
    if not _is_square(devices, size) or size < 2:
        return f"JACCL needs the devices of {size} ranks towards {size}"
    for rank in range(size):
        for other in {(rank + 1) % size, (rank - 1) % size}:
            if not devices[rank][other]:
                return f"JACCL: rank {rank} has no device towards rank {other}"
    return ""


def _matrix(devices: Sequence[Sequence[str]]) -> list[list[str | list[str] | None]]:
    """Return the ranks' devices in the JSON form that MLX reads: null for no device, a list for several."""
    return [[_device(name) if at != rank else None for at, name in enumerate(row)] for rank, row in enumerate(devices)]


def _device(name: str) -> str | list[str] | None:
    names = [each for each in name.split(SEPARATOR) if each]
    return names if len(names) > 1 else names[0] if names else None


def _is_square(devices: Sequence[Sequence[str]], size: int) -> bool:
    return len(devices) == size and all(len(row) == size for row in devices)


def _check_links(links: Sequence[Sequence[str]], size: int) -> None:
    if len(links) != size or size < 2:
        raise CannotConnect(f"a ring of {size} ranks has the links of {len(links)}")
    if len({len(each) for each in links}) != 1 or not links[0]:
        raise CannotConnect("each rank of a ring has as many links as every other, and one at least")
    addresses = [_check_address(link, "a link") for each in links for link in each]
    if len(set(addresses)) != len(addresses):
        raise CannotConnect("two links of a ring have one address")


def _check_address(address: str, owner: str) -> tuple[str, int]:
    """Return the IP address and port. MLX's backends support neither names nor IPv6. Raises `CannotConnect`."""
    ip, _, port = address.rpartition(":")
    try:
        number = int(port) if port.isascii() and port.isdecimal() else 0
        if not 0 < number < 1 << 16:
            raise ValueError
        return str(ipaddress.IPv4Address(ip)), number
    except ValueError:
        raise CannotConnect(f"{owner} is at {address!r}, which is not IPV4:PORT") from None
