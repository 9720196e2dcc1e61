"""Specification of a worker, made from its model's settings."""

from typing import Final

import msgspec

from gateway.config.host_file import devices_of
from gateway.config.settings import Config, ModelConfig
from protocol.spec import LOCAL, GroupSpec, HostSpec, WorkerSpec

# This limit is loose: the gateway bounds admission, and a new worker gets all running and waiting sequences together.
WAITING_MAX: Final = 1 << 20
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
        prefill_chunk=model.prefill_chunk,
        batching=model.batching,
        deterministic=model.deterministic,
        speculate=model.speculate,
        draft=model.draft,
        sparse_keep=model.sparse_prefill.keep,
        sparse_from=model.sparse_prefill.from_tokens if model.sparse_prefill.keep else 0,
        kind="" if model.kind == "auto" else model.kind,
        matryoshka=model.matryoshka,
        kv_bits=model.kv_bits or 0,
        adapters=tuple(model.adapters.items()),
        experts=model.experts,
        kv_events=model.kv_events.endpoint,
        kv_events_replay=model.kv_events.replay,
        kv_events_topic=model.kv_events.topic,
        expert_cache_bytes=-1 if model.expert_cache_bytes == "auto" else model.expert_cache_bytes,
        trust_remote_code=model.trust_remote_code,
        log_level=model.log_level or config.server.log_level,
        parser=model.parser,
        chat_template=model.chat_template,
        cache_bytes=-1 if model.cache.ram_bytes is None else model.cache.ram_bytes,
        kv_bytes=-1 if model.kv_bytes is None else model.kv_bytes,
        disk_cache_dir=str(config.prefix_cache_dir) if has_disk else "",
        disk_cache_bytes=config.prefix_cache_bytes if has_disk else 0,
        disk_cache_tokens=DISK_MIN_TOKENS if has_disk else 0,
        media_bytes=config.media.max_size_bytes,
        media_count=config.media.max_count,
        group=_group(model),
        keep_warm_s=model.keep_warm_s,
    )


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
        group.split,
        tuple(HostSpec(host.ssh, host.ips, devices_of(host)) for host in group.launch.hosts),
        group.python,
        group.launch.envs,
        0 if model.memory_bytes == "auto" or set(ranks) == {LOCAL} else model.memory_bytes,
    )
