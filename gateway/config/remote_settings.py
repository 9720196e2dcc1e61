"""Settings of other machines: peers, upstreams, and hosts of groups."""

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


class HostConfig(Struct, frozen=True):
    """A host in a file of mlx.launch: its destination for ssh, its addresses for ranks, and its RDMA device, or
    several, towards each host of the file in order."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()


class HostFile(Struct, frozen=True):
    """A file of mlx.launch. `envs` are variables of all ranks, as NAME=VALUE."""

    hosts: tuple[HostConfig, ...] = ()
    backend: str = ""
    envs: tuple[str, ...] = ()
