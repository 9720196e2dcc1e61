"""Spec that the gateway starts a worker with."""

import sys
from typing import Final

import msgspec

# In place of JSON in a worker's arguments: the specification is what its standard input holds.
STDIN: Final = "-"
# Adapters of one model.
ADAPTERS_MAX: Final = 64
# Name of this machine among the nodes of a group.
LOCAL: Final = "local"
# Rows that may run together where neither the configuration nor a calibration says.
USUAL_RUNNING: Final = 16


class HostSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Host of one rank: its destination for ssh, the addresses at which the rank listens, and the devices by which RDMA
    reaches each rank, its own place empty."""

    ssh: str
    ips: tuple[str, ...]
    devices: tuple[str, ...] = ()


class GroupSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Group of a model that several processes run together, as it is configured: the node of each rank, this one first.

    `parallel` is `tensor` (each rank has a part of every layer) or `pipeline` (each rank has some layers), `backend` is
    `ring`, `nccl` or `jaccl`. `split` are layers by rank of a pipeline; empty is as even as can be.
    """

    nodes: tuple[str, ...]
    parallel: str
    backend: str
    split: tuple[int, ...] = ()
    # By rank, of a group over several machines; empty is this machine alone.
    hosts: tuple[HostSpec, ...] = ()
    # The interpreter on other machines, empty for the path of this one's; and variables of all ranks, as NAME=VALUE.
    python: str = ""
    envs: tuple[str, ...] = ()
    # Of all ranks together, as the operator gives it to a group with ranks on other machines; 0 is what each has.
    memory_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.nodes)

    @property
    def variables(self) -> dict[str, str]:
        """`envs` by name."""
        return dict(each.split("=", 1) for each in self.envs)


class RankSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One rank of a group at one start; see `protocol.group`. Rank 0 binds the addresses, the others connect.

    Keys are those of `protocol.curve`. `server` is the public one of rank 0, and `members` are all others.
    """

    rank: int
    plan: str
    watch: str
    server: str
    public: str
    secret: str
    members: tuple[str, ...] = ()
    # As in `HostSpec`.
    ips: tuple[str, ...] = ("127.0.0.1",)
    devices: tuple[str, ...] = ()
    # CUDA_VISIBLE_DEVICES; empty leaves it.
    gpu: str = ""
    # Ranks of the group on this host, which share `memory_bytes`.
    beside: int = 1
    # Deadlines: until all have joined; until all are loaded, from then on; silence of a partner; CPU time of a step and
    # its age, at least: the age is below the gateway's limit, which would blame its requests; the end of the others.
    join_s: float = 60.0
    load_s: float = 600.0
    beat_s: float = 6.0
    step_s: float = 10.0
    stuck_s: float = 45.0
    leave_s: float = 1.0
    # A step of one that has done none yet, for the limit of the first ones, which compile kernels.
    first_s: float = 15.0
    # It runs on another machine than rank 0: `memory_bytes`, if not 0, is the operator's word for that machine.
    is_remote: bool = False


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Specification of a worker: JSON on its standard input. Arguments have too little room, and no secrecy.

    A field that has its default is not written: so the version before reads every specification that uses nothing new.
    New fields come last, with a default that means what the version before did; a default is never changed.

    `path` is a folder, a Hugging Face repository in the local cache, or `demo` for the embedded model.
    `dtype` is `auto` (float32 on CPU, else as stored), `float32`, `float16` or `bfloat16`.
    `context` caps the model's own window (0: the model's); `prefill_chunk` is the longest prompt chunk in tokens.
    `max_running` 0 is as many as a calibration has found to be of use.
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
    # Bytes of prefix cache in memory; -1 is a share of the machine's memory, 0 is off.
    cache_bytes: int = -1
    # Bytes of KV for running rows; -1 is half of the memory that is free once the weights are in.
    kv_bytes: int = -1
    # Which family's reasoning and tool-call markup the model writes; empty means by its template and vocabulary.
    parser: str = ""
    # The folder that all workers keep their prefix caches in, and its size in bytes; empty is off.
    disk_cache_dir: str = ""
    disk_cache_bytes: int = 0
    # Shorter prefixes than this stay in memory.
    disk_cache_tokens: int = 0
    # All that this process may take, its weights among it; 0 is no limit but the machine's.
    memory_bytes: int = 0
    # Jinja in place of the model's own chat template; empty is its own.
    chat_template: str = ""
    # How rows share a forward pass: `auto` is as the self-check of the load finds them exact, else `together`, `equal`
    # (prompts by chunks of equal length) or `single` (one request at a time), unchecked.
    batching: str = "auto"
    # One request at a time, prompt chunks by position alone, no reuse of prefixes: the same shapes in every run.
    deterministic: bool = False
    # Bounds of a request's media: bytes of one, how many, and pixels of an image as its header says.
    media_bytes: int = 32 * 1024 * 1024
    media_count: int = 64
    media_pixels: int = 64_000_000
    # Drafts of next tokens: `auto` is where they are measured to pay, `off` is never.
    speculate: str = "auto"
    # A model that drafts beside it; empty is none.
    draft: str = ""
    # One of `protocol.kinds`; empty is as the model's files say.
    kind: str = ""
    # Embeddings may be cut, also where the model's files do not declare it.
    matryoshka: bool = False
    # Names and folders of adapters that rows may have.
    adapters: tuple[tuple[str, str], ...] = ()
    # A model that several processes run together, and which of them this one is.
    group: GroupSpec | None = None
    rank: RankSpec | None = None
    # Bits of a number of the KV of running rows and cached prefixes, 8 or 4; 0 is as the model computes it.
    kv_bits: int = 0
    # Of a sparse prefill, the part of a prompt that is kept where the request names none, 0 for no sparse prefill, and
    # the tokens from which on a prompt has one.
    sparse_keep: float = 0.0
    sparse_from: int = 0
    # `disk`: a repacked model, whose experts are read when they are chosen; bytes of those in memory, -1 as usual.
    experts: str = "memory"
    expert_cache_bytes: int = -1

    # Where events of the prefix cache are published, and replayed to those who missed some; empty is nowhere.
    kv_events: str = ""
    kv_events_replay: str = ""
    kv_events_topic: str = ""

    def __post_init__(self) -> None:
        # msgspec leaves a default out only where it is the very object: a number beyond 256 that was computed is not.
        for field in msgspec.structs.fields(self):
            if getattr(self, field.name) == field.default:
                msgspec.structs.force_setattr(self, field.name, field.default)

    @property
    def identity(self) -> bytes:
        """The ROUTER identity of this incarnation."""
        return f"{self.name}#{self.epoch}".encode()


def read_spec(argument: str, *, is_line: bool = False) -> WorkerSpec:
    """The specification that `--spec` gives, as JSON or on standard input: all of that, or a line of it.

    Raises `msgspec.DecodeError`.
    """
    if argument != STDIN:
        return msgspec.json.decode(argument, type=WorkerSpec)
    text = sys.stdin.buffer.readline() if is_line else sys.stdin.buffer.read()
    return msgspec.json.decode(text, type=WorkerSpec)
