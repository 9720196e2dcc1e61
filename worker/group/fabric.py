"""Fabric of a group: MLX's communication between its ranks."""

import os
import signal
import socket
import tempfile
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import mlx.core as mx

from protocol import collectives
from protocol.failures import Code
from protocol.group import StartLoading
from protocol.spec import RankSpec
from worker.errors import LoadFailed, PartnerLost

# Timeout in seconds of connecting the ranks: native code on rank 0 of a ring would wait for the other ranks forever.
CONNECT_TIMEOUT_S: Final = 60


def own_links(rank: RankSpec) -> tuple[str, ...]:
    """Return addresses where this rank will listen, on ports that were free a moment ago. Raises `LoadFailed`."""
    links: list[str] = []
    with ExitStack() as stack:
        for ip in rank.ips:
            probe = stack.enter_context(socket.socket())
            try:
                probe.bind((ip, 0))
            except OSError as error:
                why = f"rank {rank.rank} cannot listen at {ip}, which the group has as an address of its host"
                raise LoadFailed(Code.BAD_CONFIG, f"{why}: {error.strerror}") from error
            links.append(f"{ip}:{probe.getsockname()[1]}")
    return tuple(links)


def connect(go: StartLoading, rank: RankSpec) -> Any:
    """Return MLX's group of all ranks. Raises `PartnerLost`. If native code exceeds the timeout, the process ends."""
    size = len(go.links)
    if not mx.distributed.is_available(go.backend):
        raise LoadFailed(Code.BAD_CONFIG, f"MLX of rank {rank.rank} was built without the backend '{go.backend}'")
    with tempfile.TemporaryDirectory(prefix="mlxd-group-") as folder, _within(CONNECT_TIMEOUT_S):
        _prepare(go, rank, Path(folder))
        try:
            group: Any = mx.distributed.init(strict=True, backend=go.backend)
        except RuntimeError as error:
            raise PartnerLost(f"rank {rank.rank} cannot connect by {go.backend}: {error}") from error
    if (group.rank(), group.size()) != (rank.rank, size):
        raise PartnerLost(f"{go.backend} made a group of {group.size()} for one of {size}")
    return group


def _prepare(go: StartLoading, rank: RankSpec, folder: Path) -> None:
    """Set the environment variables that MLX reads, and write the files that they name. Raises `LoadFailed`."""
    try:
        environment = collectives.environment(
            go.backend, rank.rank, len(go.links), links=go.links, devices=go.devices, coordinator=go.coordinator
        )
    except collectives.CannotConnect as reason:
        raise LoadFailed(Code.BAD_CONFIG, f"the ranks cannot be connected: {reason}") from reason
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
