"""Host file of a group over several machines: the JSON that `mlx.distributed_config` writes for `mlx.launch`."""

import ipaddress
import re
from pathlib import Path
from typing import Final

import msgspec

from gateway.config.remote_settings import HostConfig, HostFile
from protocol.collectives import BACKENDS, SEPARATOR, VARIABLES
from protocol.spec import LOCAL

FILE_BYTES_MAX: Final = 1 << 20
# All environment variables of a rank must fit into one write to its pipe.
ENVS_BYTES_MAX: Final = 4096
# mlx.launch's name for a ring over RDMA. The JACCL backend makes a ring if some pairs of hosts have no cable.
JACCL_RING: Final = "jaccl-ring"
_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=[^\n\0]*")


def read_hosts(path: Path) -> HostFile:
    """Read and check a host file. Raises `OSError`, and `ValueError` with the reason."""
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ValueError("is too large")
    try:
        read = msgspec.json.decode(path.read_bytes(), type=HostFile | tuple[HostConfig, ...])
    except msgspec.DecodeError as error:
        raise ValueError(f"is no host file of mlx.launch: {error}") from None
    file = read if isinstance(read, HostFile) else HostFile(read)
    if file.backend not in ("", JACCL_RING, *BACKENDS):
        raise ValueError(f"names the backend {file.backend!r}, which is none of {', '.join(BACKENDS)}")
    for host in file.hosts:
        _check_host(host, len(file.hosts))
    for at, host in enumerate(file.hosts):
        if host.rdma and host.rdma[at] is not None:
            raise ValueError(f"has a device of {host.ssh} towards itself: its own place in rdma is null")
    _check_variables(file.envs)
    return file


def devices_of(host: HostConfig) -> tuple[str, ...]:
    """Return the RDMA devices that connect a host to each rank, in the format of `protocol.collectives`."""
    return tuple(each or "" if isinstance(each, str | None) else SEPARATOR.join(each) for each in host.rdma)


def _check_host(host: HostConfig, count: int) -> None:
    name = host.ssh
    if not name or name == LOCAL or name.startswith("-") or not name.isprintable() or " " in name:
        raise ValueError(f"has a host whose ssh is {name!r}: a destination such as me@studio2.local is expected")
    if not host.ips:
        raise ValueError(f"has no ips of {name}, by which the other ranks reach it")
    for ip in host.ips:
        try:
            ipaddress.IPv4Address(ip)
        except ValueError:
            # MLX's backends accept only IPv4 addresses.
            raise ValueError(f"has {ip!r} as an address of {name}, which is no IPv4 address") from None
    if len(host.rdma) not in (0, count):
        raise ValueError(f"has {len(host.rdma)} rdma entries of {name} for {count} hosts")


def _check_variables(envs: tuple[str, ...]) -> None:
    for each in envs:
        found = _VARIABLE.fullmatch(each)
        if found is None:
            raise ValueError(f"has {each!r} in envs: NAME=VALUE is expected, on one line")
        if found[1] in VARIABLES:
            raise ValueError(f"has {found[1]} in envs, which mlxd sets itself for each rank")
    if len("".join(envs).encode()) > ENVS_BYTES_MAX:
        raise ValueError(f"has more than {ENVS_BYTES_MAX} bytes of envs")
