"""Specification of a worker, made from its model's settings, and the checks of groups and their host files.

A host file is the JSON that `mlx.distributed_config` writes for `mlx.launch`. A group that cannot work with its
settings and files is refused.
"""

import ipaddress
import re
import socket
from pathlib import Path
from typing import Final

import msgspec
from msgspec import structs

from gateway.config.origins import is_loopback
from gateway.config.settings import Config, GroupConfig, ModelConfig
from gateway.config.source import ConfigSource
from gateway.model_files.metadata import Unreadable, find, read_config
from protocol.checkpoint import TEXT, kind_of
from protocol.collectives import BACKENDS, VARIABLES, broken_ring_reason
from protocol.group import AUTO, JACCL, NCCL, PIPELINE, RING, indivisible_reason, resolve
from protocol.spec import LOCAL, GroupSpec, HostFile, HostSpec, WorkerSpec

FILE_BYTES_MAX: Final = 1 << 20
# All environment variables of a rank must fit into one write to its pipe.
ENVS_BYTES_MAX: Final = 4096
# mlx.launch's name for a ring over RDMA. The JACCL backend makes a ring if some pairs of hosts have no cable.
JACCL_RING: Final = "jaccl-ring"
_VARIABLE: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=[^\n\0]*")


def read_hosts(path: Path) -> HostFile:
    """Read and check a host file. Raises `OSError`, and `ValueError` with the reason."""
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ValueError("is too large")
    try:
        read = msgspec.json.decode(path.read_bytes(), type=HostFile | tuple[HostSpec, ...])
    except msgspec.DecodeError as error:
        raise ValueError(f"is no host file of mlx.launch: {error}") from None
    file = read if isinstance(read, HostFile) else HostFile(read)
    if file.backend not in ("", JACCL_RING, *BACKENDS):
        raise ValueError(f"names the backend {file.backend!r}, which is none of {', '.join(BACKENDS)}")
    for host in file.hosts:
        _check_host(host, len(file.hosts))
    for at, host in enumerate(file.hosts):
        if host.rdma and host.rdma[at] is not None:
            raise ValueError(f"has a device of {host.ssh} towards itself: its own place in rdma is null")
    _check_variables(file.envs)
    return file


def _check_host(host: HostSpec, count: int) -> None:
    name = host.ssh
    if not name or name == LOCAL or name.startswith("-") or not name.isprintable() or " " in name:
        raise ValueError(f"has a host whose ssh is {name!r}: a destination such as me@studio2.local is expected")
    if not host.ips:
        raise ValueError(f"has no ips of {name}, by which the other ranks reach it")
    for ip in host.ips:
        try:
            ipaddress.IPv4Address(ip)
        except ValueError:
            # MLX's backends accept only IPv4 addresses.
            raise ValueError(f"has {ip!r} as an address of {name}, which is no IPv4 address") from None
    if len(host.rdma) not in (0, count):
        raise ValueError(f"has {len(host.rdma)} rdma entries of {name} for {count} hosts")


def _check_variables(envs: tuple[str, ...]) -> None:
    for each in envs:
        found = _VARIABLE.fullmatch(each)
        if found is None:
            raise ValueError(f"has {each!r} in envs: NAME=VALUE is expected, on one line")
        if found[1] in VARIABLES:
            raise ValueError(f"has {found[1]} in envs, which mlxd sets itself for each rank")
    if len("".join(envs).encode()) > ENVS_BYTES_MAX:
        raise ValueError(f"has more than {ENVS_BYTES_MAX} bytes of envs")


KV_EVENTS_ADDRESS: Final = re.compile(r"tcp://(\*|[\w.:\[\]-]+):(\d{1,5})")
# This limit is loose: the gateway bounds admission, and a new worker gets all running and waiting sequences together.
WAITING_MAX: Final = 1 << 20
# Shorter prompts are computed in full, unless the request names the part to keep.
SPARSE_FROM_TOKENS: Final = 8192
# Shorter prefixes are not written to the disk: reading them would save no time, and every write wears the disk.
DISK_MIN_TOKENS: Final = 512


def worker_spec(config: Config, model: ModelConfig, down: str = "", up: str = "") -> WorkerSpec:
    """Return the specification of a model's worker. A process that only loads the model gets no addresses.

    The supervisor sets epoch, memory share and rank at each start.
    """
    # Each rank of a group has its own part of a prefix, and no file holds all parts.
    has_disk = not model.group.ranks and model.cache.disk_bytes > 0 and model.cache.ram_bytes != 0
    return WorkerSpec(
        name=model.name,
        path=model.path,
        epoch=0,
        down=down,
        up=up,
        dtype=model.dtype,
        context=model.context,
        max_running=0 if model.max_running == "auto" else model.max_running,
        max_waiting=WAITING_MAX,
        deterministic=model.deterministic,
        speculate=model.speculate,
        draft=model.draft,
        sparse_keep=model.sparse_prefill,
        sparse_from=SPARSE_FROM_TOKENS if model.sparse_prefill else 0,
        kind="" if model.kind == "auto" else model.kind,
        matryoshka=model.matryoshka,
        kv_bits=model.kv_bits or 0,
        adapters=tuple(model.adapters.items()),
        experts=model.experts,
        kv_events=model.kv_events,
        kv_events_replay=_replay_address(model.kv_events),
        kv_events_topic=f"kv@{socket.gethostname()}@{model.name}" if model.kv_events else "",
        trust_remote_code=model.trust_remote_code,
        log_level=config.server.log_level,
        parser=model.parser,
        chat_template=model.chat_template,
        cache_bytes=-1 if model.cache.ram_bytes is None else model.cache.ram_bytes,
        kv_bytes=-1 if model.kv_bytes is None else model.kv_bytes,
        disk_cache_dir=str(config.prefix_cache_dir) if has_disk else "",
        disk_cache_bytes=config.prefix_cache_bytes if has_disk else 0,
        disk_cache_tokens=DISK_MIN_TOKENS if has_disk else 0,
        media_bytes=config.media.max_size_bytes,
        group=_group(model),
        keep_warm_s=model.keep_warm_s,
    )


def _replay_address(events: str) -> str:
    """Return the address at which missed events are replayed: the next port."""
    match = KV_EVENTS_ADDRESS.fullmatch(events)
    return f"tcp://{match[1]}:{int(match[2]) + 1}" if match is not None else ""


def tells_prompts(events: str) -> bool:
    """Whether other machines can reach an address of events, which reveal prompts."""
    match = KV_EVENTS_ADDRESS.fullmatch(events)
    return match is not None and not is_loopback(match[1].strip("[]"))


def loads_alike(one: WorkerSpec, other: WorkerSpec) -> bool:
    """Whether a worker that runs with one configuration can serve the other without a restart.

    The log level and the limit of the shared cache folder may differ; they apply from the worker's next start. Adapters
    are loaded and unloaded while the worker runs.
    """
    changes = {"epoch": 0, "log_level": "", "disk_cache_bytes": 0, "memory_bytes": 0, "adapters": ()}
    return msgspec.structs.replace(one, **changes) == msgspec.structs.replace(other, **changes)


def _group(model: ModelConfig) -> GroupSpec | None:
    group, ranks = model.group, model.group.ranks
    if not ranks:
        return None
    return GroupSpec(
        ranks,
        group.parallel,
        group.backend,
        group.launch.hosts,
        group.launch.envs,
        0 if model.memory_bytes == "auto" or set(ranks) == {LOCAL} else model.memory_bytes,
    )


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
    if reason := _invalid_group_reason(model, group):
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


def _invalid_group_reason(model: ModelConfig, group: GroupConfig) -> str:
    """Return the reason why a model's group cannot run as configured; empty if none is known."""
    if group.hosts and group.nodes:
        return "nodes are ranks of this machine alone, and hosts those of a host file: give one of them"
    if absent := [node for node in group.nodes if node != LOCAL]:
        return (
            f"nodes: {absent[0]!r} is not 'local': ranks on other machines are started over ssh, from a host file: "
            "hosts = 'hosts.json'; see docs/groups.md"
        )
    ranks = group.ranks
    if not 2 <= len(ranks) <= RANKS_MAX:
        return f"a group has from 2 to {RANKS_MAX} ranks, such as nodes = ['local', 'local']"
    if group.parallel == PIPELINE and group.backend == NCCL:
        return "NCCL in MLX cannot send from rank to rank: there is no pipeline over it"
    if group.backend == JACCL and len(set(ranks)) < len(ranks):
        return "JACCL connects machines: ranks of one machine use a ring"
    return _missing_link(group) or _conflict(model) or indivisible_model_reason(model)


def _missing_link(group: GroupConfig) -> str:
    """Return the reason why the hosts of a host file cannot be connected; empty if they can."""
    hosts = group.launch.hosts
    if group.backend == JACCL:
        problem = broken_ring_reason([host.rdma for host in hosts])
        return f"{problem}: name it in rdma of {group.hosts}" if problem else ""
    if group.backend in (AUTO, RING) and len({len(host.ips) for host in hosts}) > 1:
        return f"{group.hosts}: each host of a ring has as many ips as every other, a link for each"
    return ""


def _conflict(model: ModelConfig) -> str:
    """Return which setting of the model a group does not support; empty if there is none."""
    conflicts = {
        "draft": bool(model.draft),
        "deterministic": model.deterministic,
        "kv_bits": model.kv_bits is not None,
        "adapters": bool(model.adapters),
        "sparse_prefill": model.sparse_prefill > 0,
        "keep_warm": model.keep_warm_s > 0,
        "kv_events": bool(model.kv_events),
        "experts": model.experts != "memory",
        "kind": model.kind not in (AUTO, TEXT),
    }
    name = next((name for name, is_set in conflicts.items() if is_set), "")
    return f"{name} is not for a model that several processes run" if name else ""


def indivisible_model_reason(model: ModelConfig) -> str:
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
    return indivisible_reason(config, parallel, len(group.ranks), backend=backend)
