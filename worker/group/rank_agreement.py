"""Fabric of a group: MLX's communication between its ranks.

Identity of a rank: versions and files, which must be equal on all ranks.

Memory of all ranks: the highest cost and the lowest limits among them.

Checksum of all tokens that a group has generated; if the checksum differs between ranks, the ranks are out of
step.
"""

import math
import os
import signal
import socket
import tempfile
import zlib
from array import array
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from protocol import __version__, collectives
from protocol.failures import Code
from protocol.group import JoinGroup, RankMemory, StartLoading, Versions
from protocol.model_files import TOKENIZER_FILES, digest, files_digest, weights_digest
from protocol.spec import GroupSpec, RankSpec, WorkerSpec
from worker.engine.row import Token
from worker.engine.scheduling.kv_budget import KvCost
from worker.errors import LoadFailed, PartnerLost
from worker.kv.spans_and_checkpoints import KvLayout
from worker.model.loader import resolve
from worker.model.memory import AllocationLimits
from worker.prefix_cache.radix_tree import TokenCost


@dataclass(frozen=True, slots=True)
class Identity:
    """Facts that must be equal on all ranks. `form` is a digest of the files, and of the settings that affect
    results."""

    versions: Versions
    form: str


def identity_of(spec: WorkerSpec) -> Identity:
    """Return the identity of this rank. Raises `LoadFailed`."""
    path = resolve(spec.path)
    try:
        weights = weights_digest(path)
        files = files_digest(path, ("config.json", *TOKENIZER_FILES, *sorted(file.name for file in path.glob("*.py"))))
    except (OSError, ValueError) as error:
        raise LoadFailed(Code.MODEL_CORRUPT, f"{path} cannot be read: {error}") from error
    versions = Versions(__version__, version("mlx"), version("mlx-lm"))
    return Identity(versions, digest(weights, files, spec.dtype, spec.group, spec.trust_remote_code))


def mismatch(own: Identity, join: JoinGroup, node: str, epoch: int) -> LoadFailed | None:
    """Return the reason why a rank cannot join this group; None if the rank matches."""
    place = f"rank {join.info.rank} ({node}, {join.info.host})"
    if join.versions != own.versions:
        theirs, ours = (" ".join([v.mlxd, v.mlx, v.mlx_lm]) for v in (join.versions, own.versions))
        return LoadFailed(Code.INCOMPATIBLE, f"{place} runs mlxd, mlx and mlx-lm {theirs}, and rank 0 {ours}")
    if join.form != own.form:
        return LoadFailed(Code.MODEL_CORRUPT, f"{place} has other files of the model, or other settings, than rank 0")
    if join.epoch != epoch:
        return LoadFailed(Code.INCOMPATIBLE, f"{place} is of another start, {join.epoch} instead of {epoch}")
    return None


def measured(layout: KvLayout, cost: KvCost, limits: AllocationLimits) -> RankMemory:
    # A cached prefix has keys and values for each attention layer, and up to four arrays for a recurrent layer.
    arrays = 2 * (layout.sliceable + layout.windowed) + 4 * layout.stateful
    return RankMemory(
        cost.token_bytes,
        cost.windows,
        cost.fixed_bytes,
        cost.widest,
        arrays,
        limits.kv,
        limits.prefixes,
    )


def costliest(ranks: Sequence[RankMemory]) -> KvCost:
    windows = max((each.windows for each in ranks), key=lambda windows: sum(size * count for size, count in windows))
    return KvCost(
        max(each.token_bytes for each in ranks),
        windows,
        max(each.fixed_bytes for each in ranks),
        max(each.widest for each in ranks),
    )


def token_cost(ranks: Sequence[RankMemory]) -> TokenCost | None:
    """Return the cost of cached prefixes; None if that cost is equal on all ranks."""
    costs = {(each.token_bytes, each.windows, each.fixed_bytes) for each in ranks}
    if len(costs) == 1:
        return None
    return TokenCost(
        max(each.token_bytes + sum(size for size, _ in each.windows) for each in ranks),
        max(each.fixed_bytes for each in ranks),
        max(each.arrays for each in ranks),
    )


def tightest(own: AllocationLimits, ranks: Sequence[RankMemory]) -> AllocationLimits:
    return replace(own, kv=min(each.kv_bytes for each in ranks), prefixes=min(each.prefix_bytes for each in ranks))


def extend_checksum(crc: int, tokens: Sequence[Token]) -> int:
    """Return the checksum updated with these tokens."""
    numbers = array("Q", [number for token in tokens for number in (token.row.rid, token.id)])
    return zlib.crc32(numbers.tobytes(), crc)


def own_links(spec: WorkerSpec) -> tuple[str, ...]:
    """Return addresses where this rank will listen, on ports that were free a moment ago. Raises `LoadFailed`."""
    group, own = _place(spec)
    links: list[str] = []
    with ExitStack() as stack:
        for ip in group.host(own.rank).ips:
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind((ip, 0))
            except OSError as error:
                why = f"rank {own.rank} cannot listen at {ip}, which the group has as an address of its host"
                raise LoadFailed(Code.BAD_CONFIG, f"{why}: {error.strerror}") from error
            links.append(f"{ip}:{probe.getsockname()[1]}")
    return tuple(links)


def connect(go: StartLoading, spec: WorkerSpec) -> Any:
    """Return MLX's group of all ranks. Raises `PartnerLost`. If native code exceeds the timeout, the process ends."""
    ranks, own = _place(spec)
    if not mx.distributed.is_available(go.backend):
        raise LoadFailed(Code.BAD_CONFIG, f"MLX of rank {own.rank} was built without the backend '{go.backend}'")
    # Native code on rank 0 of a ring would wait for the other ranks forever.
    with tempfile.TemporaryDirectory(prefix="mlxd-group-") as folder, _within(math.ceil(own.join_s)):
        rdma = [ranks.host(rank).rdma for rank in range(ranks.size)]
        _prepare(collectives.environment(go.backend, own.rank, go.links, rdma, go.coordinator), Path(folder))
        try:
            group: Any = mx.distributed.init(strict=True, backend=go.backend)
        except RuntimeError as error:
            raise PartnerLost(f"rank {own.rank} cannot connect by {go.backend}: {error}") from error
    if (group.rank(), group.size()) != (own.rank, ranks.size):
        raise PartnerLost(f"{go.backend} made a group of {group.size()} for one of {ranks.size}")
    return group


def _place(spec: WorkerSpec) -> tuple[GroupSpec, RankSpec]:
    """Return the group and the own rank."""
    assert spec.group is not None
    assert spec.rank is not None
    return spec.group, spec.rank


def _prepare(environment: collectives.Environment, folder: Path) -> None:
    """Set the environment variables that MLX reads, and write the files that they name."""
    for name in collectives.VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(environment.variables)
    for name, content in environment.files.items():
        file = folder / f"{name}.json"
        file.write_text(content)
        os.environ[name] = str(file)


@contextmanager
def _within(timeout_s: int) -> Generator[None]:
    """End the process by SIGALRM after the timeout. The code inside the `with` block may hold the GIL, so no thread
    could end the process."""
    before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(timeout_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
