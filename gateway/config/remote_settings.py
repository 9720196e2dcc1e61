"""Settings of other machines: peers, upstreams, and nodes of groups."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(ge=0, le=30 * 86400)]


class PeerConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[peers.NAME]`: another mlxd, whose models are served here as well. Paths are relative to this file."""

    name: str
    # Where it listens: `https://studio2.local:8484`.
    url: str
    # The file of the key that it has made for us, of role `peer`.
    key_file: str
    # PEM file of the authorities that its certificate is checked with; empty: those of the system.
    ca: str = ""
    # Whether plain HTTP may be used beyond the loopback: keys, prompts and answers can be read on the network then.
    plain_http: bool = False


class UpstreamConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[upstreams.NAME]`: an endpoint of others, to which requests leave. Paths are relative to this file."""

    name: str
    # With its version for `openai` (`https://openrouter.ai/api/v1`), without for `anthropic`.
    url: str
    dialect: Literal["openai", "anthropic"] = "openai"
    key_file: str = ""
    # From names here to names there.
    models: dict[str, str] = {}
    # The longest wait for the first byte of an answer, and between two.
    first_byte_s: Seconds = 60.0
    silence_s: Seconds = 120.0
    ca: str = ""
    plain_http: bool = False


class FabricConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`fabric` of a node: its addresses for ranks of groups, and its RDMA devices towards each other node by name.

    The name of this machine is `local`.
    """

    ips: tuple[str, ...] = ()
    rdma: dict[str, str | tuple[str, ...]] = {}


class NodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`[node]`: this machine as a node of groups that run over several machines."""

    # Where its agent listens for the gateways of `[nodes]`, as `10.0.0.1:8486`; empty: it runs no ranks of theirs.
    listen: str = ""
    fabric: FabricConfig = FabricConfig()
    # As mlx.distributed_config writes it: fabrics of this node, and of those in `[nodes]` that have none of their own.
    hostfile: str = ""
    # Whether ranks may talk over a network that others can reach: what they say is neither encrypted nor authenticated.
    allow_plain_lan: bool = False


class RemoteNodeConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[nodes.NAME]`: another mlxd that may run ranks of our groups, and whose groups may have ranks here."""

    name: str
    # Of its agent; empty: it may ask here, and is asked nothing.
    address: str = ""
    # The file of its public key. Paths are relative to this file.
    key: str
    fabric: FabricConfig = FabricConfig()
