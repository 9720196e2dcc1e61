"""Environments of MLX's distributed backends: the variables and files that each rank of a group needs before `init`.

They are those of MLX's own launcher, mlx.launch. JACCL and NCCL were not run here; the tests compare their environments
with those that mlx.launch sets.
"""

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

# RDMA devices of each rank towards each rank, as in a host file of mlx.launch.
Rdma = Sequence[Sequence[str | Sequence[str] | None]]


@dataclass(frozen=True, slots=True)
class Environment:
    """Environment variables of one rank.

    `files` maps a variable to the content of the file whose path the variable holds. All other `VARIABLES` must be
    unset.
    """

    variables: dict[str, str]
    files: dict[str, str] = field(default_factory=dict[str, str])


def environment(backend: str, rank: int, links: Sequence[Sequence[str]], rdma: Rdma, coordinator: str) -> Environment:
    """Return the environment of one rank.

    `links` are addresses `ip:port` by rank, several per rank for parallel links. `coordinator` is `ip:port` of rank 0.
    """
    own = {"MLX_RANK": str(rank)}
    match backend:
        case "ring":
            return Environment(own, {"MLX_HOSTFILE": json.dumps(links)})
        case "jaccl":
            ring = {} if has_mesh(rdma) else {"MLX_JACCL_RING": "1"}
            variables = own | ring | {"MLX_JACCL_COORDINATOR": coordinator}
            return Environment(variables, {"MLX_IBV_DEVICES": json.dumps(rdma)})
        case "nccl":
            ip, _, port = coordinator.rpartition(":")
            return Environment(own | {"MLX_WORLD_SIZE": str(len(links)), "NCCL_HOST_IP": ip, "NCCL_PORT": port})
        case _:
            raise ValueError(f"backend '{backend}' is none of {', '.join(BACKENDS)}")


def has_mesh(rdma: Rdma) -> bool:
    """Whether every two ranks are cabled to each other, in both directions."""
    size = len(rdma)
    return size <= MESH_MAX and all(rdma[a][b] for a in range(size) for b in range(size) if a != b)


def broken_ring_reason(rdma: Rdma) -> str:
    """Return the reason why JACCL cannot even form a ring of these devices; empty if it can."""
    size = len(rdma)
    if any(len(row) != size for row in rdma):
        return f"JACCL needs the devices of {size} ranks towards {size}"
    for rank in range(size):
        for other in {(rank + 1) % size, (rank - 1) % size}:
            if not rdma[rank][other]:
                return f"JACCL: rank {rank} has no device towards rank {other}"
    return ""
