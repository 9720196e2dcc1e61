"""Specification with which the gateway starts a worker."""

import sys
from functools import cache
from typing import Final

import msgspec

# Value of `--spec` that means, in place of JSON, that the specification is on standard input.
STDIN: Final = "-"
# Maximum number of adapters that one model may have.
ADAPTERS_MAX: Final = 64
# Name of this machine among the nodes of a group.
LOCAL: Final = "local"
# Maximum number of running rows if neither the configuration nor a calibration sets one.
DEFAULT_MAX_RUNNING: Final = 16
# Maximum pixels of an image, according to its header. A larger image is never decoded.
IMAGE_PIXELS_MAX: Final = 64_000_000
# Maximum number of images, videos, audio clips and PDFs in a request.
MEDIA_MAX: Final = 64


class HostSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """Host of one rank, as in a host file of mlx.launch: its ssh destination, the addresses where the rank listens, and
    its RDMA devices, of which there is one, or several, towards each rank, and none towards itself.
    """

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: tuple[str | tuple[str, ...] | None, ...] = ()


class HostFile(msgspec.Struct, frozen=True):
    """A host file of mlx.launch. `envs` are environment variables of all ranks, as NAME=VALUE."""

    hosts: tuple[HostSpec, ...] = ()
    backend: str = ""
    envs: tuple[str, ...] = ()


_THIS_HOST: Final = HostSpec(LOCAL, ("127.0.0.1",))


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Group of a model that several processes run together, as configured: the node of each rank, this machine's rank
    first.

    `parallel` is `tensor` (each rank has a part of every layer) or `pipeline` (each rank has some layers), `backend` is
    `ring`, `nccl` or `jaccl`.
    """

    nodes: tuple[str, ...]
    parallel: str
    backend: str
    # Hosts by rank of a group over several machines; empty for this machine alone.
    hosts: tuple[HostSpec, ...] = ()
    # Environment variables of all ranks, as NAME=VALUE.
    envs: tuple[str, ...] = ()
    # Total memory of the ranks, set by the operator for ranks on other machines; 0 means each machine's whole memory.
    memory_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.nodes)

    def host(self, rank: int) -> HostSpec:
        return self.hosts[rank] if self.hosts else _THIS_HOST

    def is_remote(self, rank: int) -> bool:
        """Whether a rank runs on another machine than rank 0. Its memory, if not 0, was set by the operator."""
        return self.nodes[rank] != LOCAL

    def beside(self, rank: int) -> int:
        """Return the number of ranks on a rank's host, which share the host's `memory_bytes`."""
        return self.nodes.count(self.nodes[rank])


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Rank of a group at one start; see `protocol.group`. Rank 0 binds the addresses, the others connect.

    Keys are those of `protocol.sockets`. `server` is the public key of rank 0, and `members` are those of all others.
    """

    rank: int
    plan: str
    watch: str
    server: str
    public: str
    secret: str
    members: tuple[str, ...] = ()
    # The times of `worker.group.rank_heartbeats`, in seconds. Timeout until all ranks have joined, and then of their
    # connection by MLX.
    join_s: float = 60.0
    # Timeout after joining until all ranks have loaded.
    load_s: float = 600.0
    # Timeout without a heartbeat.
    beat_s: float = 6.0
    # Minimum CPU time of a step that counts as stuck.
    step_s: float = 10.0
    # Minimum age of a step that counts as stuck. It is below the gateway's limit, so that no request is suspected.
    stuck_s: float = 45.0
    # Timeout until the other ranks have left.
    leave_s: float = 1.0
    # Assumed duration of the first steps, which compile kernels.
    first_s: float = 15.0


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Specification of a worker: JSON on its standard input, because arguments are limited in size and not secret.

    A field that has its default value is omitted, so that the previous version can read any specification that uses no
    new feature. New fields come last, with a default that means the previous version's behaviour; a default is never
    changed. `path` is a folder, a Hugging Face repository in the local cache, or `demo` for the embedded model. `dtype`
    is `auto` (float32 on CPU, otherwise as stored), `float32`, `float16` or `bfloat16`. `context` caps the model's own
    window (0: the model's); `prefill_chunk` is the longest prompt chunk in tokens. If `max_running` is 0, the number of
    rows comes from a calibration; without one, a default applies.
    """

    name: str
    path: str
    epoch: int
    down: str
    up: str
    dtype: str = "auto"
    context: int = 0
    max_running: int = 16
    max_waiting: int = 256
    prefill_chunk: int = 512
    trust_remote_code: bool = False
    orphan_grace_s: float = 30.0
    orphan_max_s: float = 300.0
    log_level: str = "info"
    # Size of the prefix cache in memory; -1 means a share of the machine's memory, 0 turns the cache off.
    cache_bytes: int = -1
    # Bytes of KV for running rows; -1 means half of the memory that is free once the weights are loaded.
    kv_bytes: int = -1
    # Family of the model's reasoning and tool-call markup; empty means detection by template and vocabulary.
    parser: str = ""
    # Folder of the disk caches of all workers; empty means no disk cache.
    disk_cache_dir: str = ""
    # Maximum size of the disk caches' folder in bytes.
    disk_cache_bytes: int = 0
    # Minimum tokens of a prefix in the disk cache; shorter prefixes stay in memory.
    disk_cache_tokens: int = 0
    # Maximum memory of this process including its weights; 0 means the machine's memory.
    memory_bytes: int = 0
    # Jinja template that replaces the model's own chat template; empty means its own.
    chat_template: str = ""
    # Batch mode of rows. `auto` selects the fastest mode that the self-check at load finds exact. The modes `together`,
    # `equal` (prompts in chunks of equal length) and `single` (one request at a time) are not checked.
    batching: str = "auto"
    # Whether all runs compute the same shapes: one request at a time, prompt chunks by position only, no reuse of
    # prefixes.
    deterministic: bool = False
    # Maximum bytes of one medium in a request.
    media_bytes: int = 32 * 1024 * 1024
    # Maximum number of media in a request.
    media_count: int = MEDIA_MAX
    # Maximum pixels of an image, according to its header.
    media_pixels: int = IMAGE_PIXELS_MAX
    # Drafts of next tokens: `auto` if measured to be faster, or `off`.
    speculate: str = "auto"
    # Draft model, in the same form as `path`; empty means none.
    draft: str = ""
    # Kind of the model, one of `protocol.checkpoint`; empty means detection from the model's files.
    kind: str = ""
    # Whether embeddings may be truncated even if the model's files do not declare it.
    matryoshka: bool = False
    # Names and folders of adapters that rows may use.
    adapters: tuple[tuple[str, str], ...] = ()
    # Group of a model that several processes run together; None for a single process.
    group: GroupSpec | None = None
    # Rank of this process in the group; None for a single process.
    rank: RankSpec | None = None
    # Bits per value of the KV of running rows and cached prefixes, 8 or 4; 0 means the model's own precision.
    kv_bits: int = 0
    # Default share of a prompt that a sparse prefill keeps; 0 means no sparse prefill.
    sparse_keep: float = 0.0
    # Minimum length in tokens of a prompt that is prefilled sparsely if the request names no share.
    sparse_from: int = 0
    # Place of the experts: `memory`, or `disk`, where a repacked model's experts are read when they are chosen.
    experts: str = "memory"
    # Size in bytes of the cache for experts in memory; -1 means the default.
    expert_cache_bytes: int = -1
    # Address where events of the prefix cache are published; empty means that they are not published.
    kv_events: str = ""
    # Address where missed events are replayed; empty means that they are not replayed.
    kv_events_replay: str = ""
    kv_events_topic: str = ""
    # Seconds after its newest request for which an idle model is kept warm by forward passes; 0 means not at all.
    keep_warm_s: float = 0.0

    def __post_init__(self) -> None:
        # msgspec omits a default only if the value is the same object, and a computed number above 256 is another
        # object.
        for name, default in _defaults():
            if getattr(self, name) == default:
                msgspec.structs.force_setattr(self, name, default)

    @property
    def identity(self) -> bytes:
        """ROUTER identity of this process."""
        return f"{self.name}#{self.epoch}".encode()


@cache
def _defaults() -> list[tuple[str, object]]:
    """Return the fields of a specification with their defaults, which msgspec would derive from the types each time."""
    return [(field.name, field.default) for field in msgspec.structs.fields(WorkerSpec)]


def read_spec(argument: str, *, is_line: bool = False) -> WorkerSpec:
    """Read the specification that `--spec` passes: JSON, or `-` for standard input, of which only a line is read if
    `is_line`.

    Raises `msgspec.DecodeError`.
    """
    if argument != STDIN:
        return msgspec.json.decode(argument, type=WorkerSpec)
    text = sys.stdin.buffer.readline() if is_line else sys.stdin.buffer.read()
    return msgspec.json.decode(text, type=WorkerSpec)
