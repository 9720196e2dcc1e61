"""Settings of other machines and of groups: upstreams, ranks and their hosts."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.spec import LOCAL

Seconds = Annotated[float, Meta(ge=0, le=30 * 86400)]


class UpstreamConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`[upstreams.NAME]`: a remote endpoint to which requests may fall back. Paths are relative to this file."""

    name: str
    # The base URL includes the version for `openai` (`https://openrouter.ai/api/v1`) but not for `anthropic`.
    url: str
    dialect: Literal["openai", "anthropic"] = "openai"
    key_file: str = ""
    # Maps local names of models to the upstream's names.
    models: dict[str, str] = {}
    # Maximum waits for the first byte of an answer, and from one part of it to the next.
    first_byte_s: Seconds = 60.0
    silence_s: Seconds = 120.0
    ca: str = ""
    plain_http: bool = False


class HostConfig(Struct, frozen=True):
    """A host in a host file: its destination for ssh, the addresses of its ranks, and its RDMA devices. There is one
    device, or several, for each host of the file in order.
    """

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()


class HostFile(Struct, frozen=True):
    """A host file of mlx.launch. `envs` are environment variables of all ranks, as NAME=VALUE."""

    hosts: tuple[HostConfig, ...] = ()
    backend: str = ""
    envs: tuple[str, ...] = ()


class GroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Section `group` of a model: processes, called ranks, that run the model together, each with a part of it. Without
    ranks, one process runs the whole model.
    """

    # One entry `local` for each rank, if the group runs on this machine alone.
    nodes: tuple[str, ...] = ()
    # `tensor` gives each rank a part of every layer; `pipeline` gives each rank some whole layers.
    parallel: Literal["auto", "tensor", "pipeline"] = "auto"
    backend: Literal["auto", "ring", "nccl", "jaccl"] = "auto"
    # Number of layers of each rank of a pipeline.
    split: tuple[Annotated[int, Meta(ge=1)], ...] = ()
    # Host file of mlx.launch, for a group over several machines. Its path is relative to the configuration file, and
    # its first host is this machine.
    hosts: str = ""
    # Path of the Python interpreter with mlxd on the other machines; empty means the same path as on this machine.
    python: str = ""
    # Content of the host file.
    launch: HostFile = HostFile()

    @property
    def ranks(self) -> tuple[str, ...]:
        """Location of each rank: `local`, or the ssh destination of its host."""
        # mlx.launch uses no ssh for ranks at 127.0.0.1.
        names = (LOCAL if host.ssh == "127.0.0.1" else host.ssh for host in self.launch.hosts[1:])
        return (LOCAL, *names) if self.launch.hosts else self.nodes
