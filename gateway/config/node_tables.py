"""`[node]` and `[nodes.NAME]`: this machine and others as nodes of groups, checked with the files that they name."""

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from gateway.config.remote_settings import FabricConfig, NodeConfig, RemoteNodeConfig
from gateway.config.source import ConfigSource
from protocol.curve import is_key

# The name of this machine in a group's `nodes`.
LOCAL: Final = "local"
PORT_MAX: Final = 65535
# A file of ours, or of mlx.distributed_config.
FILE_BYTES_MAX: Final = 1 << 20


class _Host(Struct, frozen=True):
    """A host in a file of mlx.distributed_config; `rdma` has a device, or several, for each host in order."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()


class _Hostfile(Struct, frozen=True):
    hosts: tuple[_Host, ...]


def read_node(source: ConfigSource, raw: Any, node_name: str) -> NodeConfig:
    """With its fabric from the hostfile, if it has none of its own. Raises `ConfigError`."""
    table = _with_fabric(source, source.table(raw, NodeConfig, ("node",)), ("node",))
    node = source.convert(table, NodeConfig, ("node",))
    if node.listen and (reason := bad_address(node.listen, may_be_any_port=True)):
        raise source.error(f"listen: {node.listen!r} {reason}", ("node", "listen"))
    _check_fabric(source, node.fabric, ("node",))
    if not node.hostfile:
        return node
    node = structs.replace(node, hostfile=str(source.path_of(node.hostfile)))
    fabrics = _imported(source, node, node_name)
    return structs.replace(node, fabric=fabrics.get(LOCAL, node.fabric)) if node.fabric == FabricConfig() else node


def read_nodes(
    source: ConfigSource, raw: Any, node: NodeConfig, node_name: str, bad_name: Callable[[str], str | None]
) -> dict[str, RemoteNodeConfig]:
    """All of them, with absolute paths. Raises `ConfigError`."""
    if not isinstance(raw, dict):
        raise source.error("nodes must be a table: write [nodes.NAME]", ("nodes",))
    fabrics = _imported(source, node, node_name) if node.hostfile else {}
    nodes: dict[str, RemoteNodeConfig] = {}
    keys: dict[str, str] = {}
    for name, body in raw.items():
        where = ("nodes", name)
        reason = "is this machine" if name == LOCAL else "must not contain '/'" if "/" in name else bad_name(name)
        if reason:
            raise source.error(f"node name {name!r} {reason}", where)
        remote = _remote(source, name, body, where)
        if remote.fabric == FabricConfig():
            remote = structs.replace(remote, fabric=fabrics.get(name, remote.fabric))
        public = read_public(Path(remote.key))
        if (other := keys.setdefault(public, name)) != name:
            raise source.error(f"key: it is that of node {other!r}", (*where, "key"))
        nodes[name] = remote
    return nodes


def _remote(source: ConfigSource, name: str, body: Any, where: tuple[str, ...]) -> RemoteNodeConfig:
    table = _with_fabric(source, source.table(body, RemoteNodeConfig, where, hidden=("name",)), where)
    if "key" not in table:
        raise source.error("a node needs key: run mlxctl node add", where)
    remote = source.convert(table | {"name": name}, RemoteNodeConfig, where)
    if remote.address and (reason := bad_address(remote.address)):
        raise source.error(f"address: {remote.address!r} {reason}", (*where, "address"))
    _check_fabric(source, remote.fabric, where)
    path = source.path_of(remote.key)
    try:
        read_public(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise source.error(f"key: {path}: {reason}", (*where, "key")) from None
    return structs.replace(remote, key=str(path))


def read_public(path: Path) -> str:
    """The public key in a file. Raises `OSError`, and `ValueError` for what is none."""
    text = path.read_text(encoding="ascii", errors="replace").strip()
    if not is_key(text):
        raise ValueError("holds no public key: 64 hexadecimal digits are expected")
    return text


def bad_address(address: str, *, may_be_any_port: bool = False) -> str:
    """The reason why an agent cannot be at this address: an IPv4 address or a name, and a port."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdecimal()):
        return "must be HOST:PORT, such as 10.0.0.2:8486"
    if not (0 if may_be_any_port else 1) <= int(port) <= PORT_MAX:
        return "has no port that there can be"
    if any(character in host for character in "/*[]@ "):
        return "has no host name or IPv4 address"
    return ""


def _with_fabric(source: ConfigSource, table: dict[str, Any], where: tuple[str, ...]) -> dict[str, Any]:
    if "fabric" in table:
        table["fabric"] = source.table(table["fabric"], FabricConfig, (*where, "fabric"))
    return table


def _check_fabric(source: ConfigSource, fabric: FabricConfig, where: tuple[str, ...]) -> None:
    for address in fabric.ips:
        try:
            ipaddress.IPv4Address(address)
        except ValueError:
            # MLX's backends take no other.
            raise source.error(f"ips: {address!r} is no IPv4 address", (*where, "fabric")) from None


def _imported(source: ConfigSource, node: NodeConfig, node_name: str) -> dict[str, FabricConfig]:
    """The fabrics of a file of mlx.distributed_config, by the names of nodes. Raises `ConfigError`."""
    path, where = Path(node.hostfile), ("node", "hostfile")
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ValueError("is too large")
        return fabrics_of(path.read_bytes(), node_name)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise source.error(f"hostfile: {path}: {reason}", where) from None


def fabrics_of(content: bytes, node_name: str) -> dict[str, FabricConfig]:
    """Fabrics by name: of each host what `ssh` calls it, without user and domain; of this machine also `local`.

    This machine is the host of the name `node_name`, or `localhost`. Raises `ValueError`.
    """
    try:
        hosts = msgspec.json.decode(content, type=_Hostfile | tuple[_Host, ...])
    except msgspec.DecodeError as error:
        raise ValueError(f"is no file of mlx.distributed_config: {error}") from None
    entries = hosts.hosts if isinstance(hosts, _Hostfile) else hosts
    names = [_short(host.ssh) for host in entries]
    own = [at for at, name in enumerate(names) if name in (_short(node_name), "localhost", "127.0.0.1")]
    fabrics: dict[str, FabricConfig] = {}
    for at, host in enumerate(entries):
        if len(host.rdma) not in (0, len(entries)):
            raise ValueError(f"{host.ssh} has {len(host.rdma)} rdma entries for {len(entries)} hosts")
        rdma = {_peer(names, other, own): device for other, device in enumerate(host.rdma) if device and other != at}
        fabric = FabricConfig(host.ips, rdma)
        fabrics[names[at]] = fabric
        if at in own:
            fabrics[LOCAL] = fabric
    return fabrics


def _peer(names: list[str], at: int, own: list[int]) -> str:
    return LOCAL if at in own else names[at]


def _short(ssh: str) -> str:
    """`user@studio2.local` is studio2; an address stays as it is."""
    host = ssh.rpartition("@")[2]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.partition(".")[0]
