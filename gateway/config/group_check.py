"""`group` of a model: refused with the reason where it cannot work, as far as its files and settings tell."""

from collections.abc import Mapping

from gateway.config.node_tables import LOCAL
from gateway.config.remote_settings import NodeConfig, RemoteNodeConfig
from gateway.config.settings import GroupConfig, ModelConfig
from gateway.config.source import ConfigSource
from gateway.model_files.metadata import Unreadable, find, read_config
from protocol.collectives import ring_problem
from protocol.kinds import TEXT, kind_of
from protocol.sharding import AUTO, JACCL, NCCL, PIPELINE, refusal, resolve

RANKS_MAX = 64


def check_groups(
    source: ConfigSource, models: dict[str, ModelConfig], own: NodeConfig, nodes: Mapping[str, RemoteNodeConfig]
) -> None:
    """Raises `ConfigError`. `own` is `[node]`, `nodes` are those of `[nodes]`."""
    for model in models.values():
        if model.group == GroupConfig():
            continue
        if reason := _problem(model, model.group, nodes) or _missing_cable(model.group, own, nodes):
            raise source.error(f"group: {reason}", ("models", model.name, "group"))


def _problem(model: ModelConfig, group: GroupConfig, nodes: Mapping[str, RemoteNodeConfig]) -> str:
    """The reason why a model cannot run as it is configured; empty where it can, as far as this is known."""
    if not 2 <= len(group.nodes) <= RANKS_MAX:
        return f"nodes: a group has from 2 to {RANKS_MAX} ranks, such as nodes = ['local', 'local']"
    if group.nodes[0] != LOCAL:
        return "nodes: the first is 'local', the rank that talks to clients"
    absent = [node for node in group.nodes if node != LOCAL and node not in nodes]
    if absent:
        return f"nodes: there is no [nodes.{absent[0]}]"
    others = [node for node in group.nodes if node != LOCAL]
    if silent := [node for node in others if not nodes[node].address]:
        return f"nodes: [nodes.{silent[0]}] has no address, and is asked nothing"
    if len(set(others)) < len(others):
        return "nodes: another machine has one rank of a group at most"
    if group.split and len(group.split) != len(group.nodes):
        return f"split: {list(group.split)} has {len(group.split)} numbers for {len(group.nodes)} ranks"
    if group.parallel == PIPELINE and group.backend == NCCL:
        return "NCCL in MLX cannot send from rank to rank: there is no pipeline over it"
    if group.backend == JACCL and group.nodes.count(LOCAL) > 1:
        return "JACCL connects machines: ranks of one machine use a ring"
    return _conflict(model) or model_problem(model)


def _missing_cable(group: GroupConfig, own: NodeConfig, nodes: Mapping[str, RemoteNodeConfig]) -> str:
    """The reason why JACCL cannot connect these machines, by their RDMA devices."""
    if group.backend != JACCL:
        return ""
    fabrics = [own.fabric if node == LOCAL else nodes[node].fabric for node in group.nodes]
    devices = [
        ["x" if other in fabric.rdma and other != node else "" for other in group.nodes]
        for node, fabric in zip(group.nodes, fabrics, strict=True)
    ]
    if problem := ring_problem(devices, len(devices)):
        return f"{problem}: name it in `fabric` of [node] and [nodes.NAME], or import a hostfile"
    return ""


def _conflict(model: ModelConfig) -> str:
    """A setting that a group does not honour."""
    conflicts = {
        "draft": bool(model.draft),
        "deterministic": model.deterministic,
        "batching": model.batching not in (AUTO, "together"),
        "kv_bits": model.kv_bits is not None,
        "adapters": bool(model.adapters),
        "sparse_prefill": model.sparse_prefill.keep > 0,
        "kv_events": bool(model.kv_events.endpoint),
        "experts": model.experts != "memory",
        "kind": model.kind not in (AUTO, TEXT),
    }
    name = next((name for name, is_set in conflicts.items() if is_set), "")
    return f"{name} is not for a model that several processes run" if name else ""


def model_problem(model: ModelConfig) -> str:
    """The reason why a model's files cannot be divided so; empty where they can, or are not there to be asked."""
    try:
        folder = find(model.path)
        config = read_config(folder)
        kind = kind_of(config, {file.name for file in folder.iterdir()}, model.path)
    except (Unreadable, OSError):
        return ""
    if kind != TEXT:
        return "models of embeddings and scores run in one process"
    group = model.group
    # Without CUDA `auto` is a ring; with it, the worker has the last word.
    parallel, backend = resolve(config, group.parallel, group.backend, has_cuda=False)
    return refusal(config, parallel, len(group.nodes), group.split, backend)
