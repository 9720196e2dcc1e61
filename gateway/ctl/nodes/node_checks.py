"""Checks of other nodes, each asked over its agent: whether a group with them can work."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.config.remote_settings import RemoteNodeConfig
from gateway.config.settings import Config
from gateway.ctl.doctor.checks import DoctorFinding
from gateway.nodes.agent_client import AgentClient, NodeLost, NodeRefused
from gateway.nodes.networks import Interface, interfaces, objection
from gateway.nodes.node_keys import own_pair, public_of
from gateway.nodes.this_host import versions
from protocol.curve import KeyPair
from protocol.group import Versions
from protocol.node_agent import Describe, Described

ANSWER_S: Final = 5.0


def examine_nodes(home: Path, config: Config, only: str = "") -> Iterator[DoctorFinding]:
    """All nodes that are asked, or one. Raises `Failed`."""
    own = own_pair(home)
    yield from own_fabric(config, interfaces())
    for node in config.nodes.values():
        if only in ("", node.name):
            yield from _examine(node, own)


def own_fabric(config: Config, known: list[Interface]) -> Iterator[DoctorFinding]:
    """Addresses of this machine for ranks."""
    for ip in config.node.fabric.ips:
        reason = objection(ip, config.node, known)
        yield DoctorFinding(f"fabric {ip}", "bad" if reason else "ok", reason or "is ours, and nobody else is on it")


def _examine(node: RemoteNodeConfig, own: KeyPair) -> Iterator[DoctorFinding]:
    title = f"node {node.name}"
    if not node.address:
        yield DoctorFinding(title, "skip", "has no address: it may ask here, and is asked nothing")
        return
    try:
        said = asyncio.run(_describe(node, own))
    except (NodeLost, NodeRefused) as error:
        advice = (
            f"see that mlxd runs there with [node] listen, and that 'mlxctl node list' shows our key there ({title})"
        )
        yield DoctorFinding(title, "bad", str(error), advice)
        return
    yield from judge(node, said, versions())


def judge(node: RemoteNodeConfig, said: Described, ours: Versions) -> Iterator[DoctorFinding]:
    """Findings from an agent's description of itself, beside what is configured of it here."""
    title = f"node {node.name}"
    yield DoctorFinding(
        title, "ok", f"answers as {said.node}, {said.platform}, {_gib(said.free_bytes)} of memory are free"
    )
    if said.versions != ours:
        theirs, own = _text(said.versions), _text(ours)
        yield DoctorFinding(title, "bad", f"has {theirs}, and this machine {own}", "install the same version on both")
    else:
        yield DoctorFinding(title, "ok", f"has the versions of this machine: {_text(ours)}")
    for ip in node.fabric.ips:
        if ip in said.trusted_ips:
            yield DoctorFinding(title, "ok", f"lets ranks listen at {ip}")
        else:
            reason = f"does not let ranks listen at {ip}: it is none of its fabric, or open to others"
            yield DoctorFinding(
                title, "bad", reason, f"set fabric in [node] there; see mlxctl node doctor on {node.name}"
            )


async def _describe(node: RemoteNodeConfig, own: KeyPair) -> Described:
    client = AgentClient(node.name, node.address, public_of(node.key), own)
    client.open()
    try:
        return await client.ask(lambda call: Describe(call), Described, ANSWER_S)
    finally:
        await client.close()


def _text(known: Versions) -> str:
    return f"mlxd {known.mlxd}, mlx {known.mlx or 'none'}, mlx-lm {known.mlx_lm or 'none'}"


def _gib(count: int) -> str:
    return f"{count / 1024**3:.1f} GiB"
