"""Checks of a model's `group` and its host file. A group that cannot work with its settings and files is refused."""

from msgspec import structs

from gateway.config.host_file import JACCL_RING, devices_of, read_hosts
from gateway.config.remote_settings import GroupConfig
from gateway.config.settings import ModelConfig
from gateway.config.source import ConfigSource
from gateway.model_files.metadata import Unreadable, find, read_config
from protocol.collectives import ring_problem
from protocol.kinds import TEXT, kind_of
from protocol.sharding import AUTO, JACCL, NCCL, PIPELINE, RING, refusal, resolve
from protocol.spec import LOCAL

RANKS_MAX = 64


def check_groups(source: ConfigSource, models: dict[str, ModelConfig]) -> dict[str, ModelConfig]:
    """Check all groups, and return the models with the content of their host files. Raises `ConfigError`."""
    return {
        name: model if model.group == GroupConfig() else _checked(source, model, ("models", name, "group"))
        for name, model in models.items()
    }


def _checked(source: ConfigSource, model: ModelConfig, where: tuple[str, ...]) -> ModelConfig:
    group = _with_hosts(source, model.group, where) if model.group.hosts else model.group
    model = structs.replace(model, group=group)
    if reason := _problem(model, group):
        raise source.error(f"group: {reason}", where)
    return model


def _with_hosts(source: ConfigSource, group: GroupConfig, where: tuple[str, ...]) -> GroupConfig:
    """Return the group with the content of its host file, whose backend is the default. Raises `ConfigError`."""
    path = source.path_of(group.hosts)
    try:
        file = read_hosts(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise source.error(f"group: hosts: {path}: {reason}", where) from None
    named = JACCL if file.backend == JACCL_RING else file.backend
    backend = named if named and group.backend == AUTO else group.backend
    return structs.replace(group, hosts=str(path), launch=file, backend=backend)


def _problem(model: ModelConfig, group: GroupConfig) -> str:
    """Return the reason why a model's group cannot run as configured; empty if none is known."""
    if group.hosts and group.nodes:
        return "nodes are ranks of this machine alone, and hosts those of a host file: give one of them"
    if group.python and not group.hosts:
        return "python is of other machines, which a host file names: hosts = 'hosts.json'"
    if absent := [node for node in group.nodes if node != LOCAL]:
        return (
            f"nodes: {absent[0]!r} is not 'local': ranks on other machines are started over ssh, from a host file: "
            "hosts = 'hosts.json'; see docs/groups.md"
        )
    ranks = group.ranks
    if not 2 <= len(ranks) <= RANKS_MAX:
        return f"a group has from 2 to {RANKS_MAX} ranks, such as nodes = ['local', 'local']"
    if group.split and len(group.split) != len(ranks):
        return f"split: {list(group.split)} has {len(group.split)} numbers for {len(ranks)} ranks"
    if group.parallel == PIPELINE and group.backend == NCCL:
        return "NCCL in MLX cannot send from rank to rank: there is no pipeline over it"
    if group.backend == JACCL and len(set(ranks)) < len(ranks):
        return "JACCL connects machines: ranks of one machine use a ring"
    return _missing_link(group) or _conflict(model) or model_problem(model)


def _missing_link(group: GroupConfig) -> str:
    """Return the reason why the hosts of a host file cannot be connected; empty if they can."""
    hosts = group.launch.hosts
    if group.backend == JACCL:
        problem = ring_problem([devices_of(host) for host in hosts], len(hosts))
        return f"{problem}: name it in rdma of {group.hosts}" if problem else ""
    if group.backend in (AUTO, RING) and len({len(host.ips) for host in hosts}) > 1:
        return f"{group.hosts}: each host of a ring has as many ips as every other, a link for each"
    return ""


def _conflict(model: ModelConfig) -> str:
    """Return which setting of the model a group does not support; empty if there is none."""
    conflicts = {
        "draft": bool(model.draft),
        "deterministic": model.deterministic,
        "batching": model.batching not in (AUTO, "together"),
        "kv_bits": model.kv_bits is not None,
        "adapters": bool(model.adapters),
        "sparse_prefill": model.sparse_prefill.keep > 0,
        "keep_warm": model.keep_warm_s > 0,
        "kv_events": bool(model.kv_events.endpoint),
        "experts": model.experts != "memory",
        "kind": model.kind not in (AUTO, TEXT),
    }
    name = next((name for name, is_set in conflicts.items() if is_set), "")
    return f"{name} is not for a model that several processes run" if name else ""


def model_problem(model: ModelConfig) -> str:
    """Return why a model's files cannot be split among the group's ranks; empty if they can, or are not on this
    machine.
    """
    try:
        folder = find(model.path)
        config = read_config(folder)
        kind = kind_of(config, {file.name for file in folder.iterdir()}, model.path)
    except (Unreadable, OSError):
        return ""
    if kind != TEXT:
        return "models of embeddings and scores run in one process"
    group = model.group
    # `auto` is a ring without CUDA; with CUDA the worker decides.
    parallel, backend = resolve(config, group.parallel, group.backend, has_cuda=False)
    return refusal(config, parallel, len(group.ranks), group.split, backend)
