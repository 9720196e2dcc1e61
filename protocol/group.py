"""Messages between the ranks of a group: one model that several processes run together, each with a part of it.

Rank 0 is an ordinary worker to its gateway. It makes every decision that depends on a clock, a thread, memory or a
client, and sends it in a `TickPlan` before each tick; the others, its followers, replay the plan on their parts. A
follower has two connections to rank 0, which binds both: the *plan*, between the two engine threads, and the *watch*,
between threads that no engine can block. Both are CURVE over TCP, with keys that the gateway makes for each start. All
ranks run one version of mlxd, which is in `JoinGroup` and which rank 0 checks, so that fields may change between
versions. The routing id of a message is its sender's rank. `SetMemory`, `Shutdown` and `Goodbye` are the messages
between gateway and worker.

Plan: `JoinGroup` up, `StartLoading` down, `RankLoaded` up, then `TickPlan` down and `PlanDone` up for each tick, with a
`RankMemory` before it if the plan contains a `SetMemory`. Watch: `RankHeartbeat` both ways, and `Goodbye` up.

Division of a model among the ranks of a group: which architectures of mlx-lm can be divided, and into how many
parts.

The gateway refuses impossible divisions before anything is loaded; the worker chooses the division.
"""

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from protocol.codec import decode
from protocol.from_worker import Goodbye, RankInfo
from protocol.to_worker import SetMemory, Shutdown

TENSOR: Final = "tensor"
PIPELINE: Final = "pipeline"
AUTO: Final = "auto"
RING: Final = "ring"
NCCL: Final = "nccl"
JACCL: Final = "jaccl"

# Architectures, by `model_type`, whose mlx-lm class has a `shard` or a pipeline; a test compares both with the library.
TENSOR_TYPES: Final = frozenset(
    {
        "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "deepseek_v41_text", "exaone_moe", "glm4_moe",
        "glm4_moe_lite", "glm_moe_dsa", "gpt_oss", "iquestcoder", "iquestloopcoder", "joyai_llm_flash", "kimi_k2",
        "kimi_k25", "kimi_k3", "llama", "longcat_flash", "longcat_flash_ngram", "minimax", "minimax_m2",
        "minimax_m3_vl", "ministral3", "mistral", "mistral4", "muse_spark", "prism_hadamard_qwen35", "qwen2", "qwen3",
        "qwen3_5", "qwen3_5_moe", "qwen3_moe", "solar_open", "step3p5", "xverse",
    }
)  # fmt: skip
PIPELINE_TYPES: Final = frozenset(
    {
        "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "deepseek_v41_text",
        "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "joyai_llm_flash", "kimi_k2", "kimi_k25", "kimi_k3",
        "minimax_m3_vl", "ministral3", "mistral4", "muse_spark", "prism_hadamard_qwen35", "qwen2", "qwen3_5",
        "qwen3_5_moe", "qwen3_moe", "qwen3_next", "solar_open",
    }
)  # fmt: skip
# Architectures that repeat key and value heads if the model has fewer of them than the group has ranks.
_REPEATS: Final = frozenset({"qwen3_5", "qwen3_5_moe", "prism_hadamard_qwen35"})
# Configuration keys of sizes that are divided among the ranks.
_HEADS: Final = ("num_attention_heads", "linear_num_key_heads", "linear_num_value_heads")
_WIDTHS: Final = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def resolve(config: Mapping[str, Any], parallel: str, backend: str, *, has_cuda: bool) -> tuple[str, str]:
    """Resolve an `auto` backend to NCCL if MLX computes on CUDA, otherwise to a ring; also resolve `auto` parallelism.

    A ring gets a pipeline if the architecture has one, because each layer of a tensor-parallel model waits for the
    network twice.
    """
    backend = (NCCL if has_cuda else RING) if backend == AUTO else backend
    if parallel == AUTO:
        kind = config.get("model_type")
        is_tensor = kind in TENSOR_TYPES and (backend != RING or kind not in PIPELINE_TYPES)
        parallel = TENSOR if is_tensor else PIPELINE
    return parallel, backend


def indivisible_reason(config: Mapping[str, Any], parallel: str, ranks: int, backend: str = "") -> str:
    """Return the reason why a model cannot be divided as requested; empty if it can."""
    kind = config.get("model_type")
    if parallel == PIPELINE and backend == NCCL:
        return "NCCL in MLX cannot send from rank to rank: there is no pipeline over it; use parallel = 'tensor'"
    types = TENSOR_TYPES if parallel == TENSOR else PIPELINE_TYPES
    if kind not in types:
        other = "pipeline" if kind in PIPELINE_TYPES else "tensor" if kind in TENSOR_TYPES else ""
        hint = f"; parallel = '{other}' can be used" if other and other != parallel else "; it needs one process"
        return f"mlx-lm cannot run '{kind}' {parallel}-parallel{hint}"
    text = _text(config)
    if parallel == PIPELINE:
        layers = text.get("num_hidden_layers")
        is_short = isinstance(layers, int) and layers < ranks
        return f"{layers} layers are too few for {ranks} ranks" if is_short else ""
    return _tensor_reason(kind in _REPEATS, text, ranks) or _groups_reason(config, text, ranks)


def _tensor_reason(repeats: bool, text: Mapping[str, Any], ranks: int) -> str:
    for name in (*_HEADS, *_WIDTHS):
        count = text.get(name)
        if isinstance(count, int) and count % ranks:
            return f"{name} = {count} cannot be divided by {ranks} ranks"
    kv_heads = text.get("num_key_value_heads")
    if isinstance(kv_heads, int) and kv_heads % ranks and not (repeats and ranks % kv_heads == 0):
        return f"num_key_value_heads = {kv_heads} cannot be divided by {ranks} ranks"
    return ""


def _groups_reason(config: Mapping[str, Any], text: Mapping[str, Any], ranks: int) -> str:
    """Refuse a division that would split a quantization group, whose values share a scale."""
    quantization = config.get("quantization") or config.get("quantization_config")
    size = quantization.get("group_size") if isinstance(quantization, dict) else None
    if not isinstance(size, int):
        return ""
    heads, hidden = text.get("num_attention_heads"), text.get("hidden_size")
    head = text.get("head_dim") or (hidden // heads if isinstance(hidden, int) and isinstance(heads, int) else None)
    widths = {name: text.get(name) for name in _WIDTHS}
    widths["the width of attention"] = heads * head if isinstance(heads, int) and isinstance(head, int) else None
    for name, width in widths.items():
        if isinstance(width, int) and width and width // ranks % size:
            return f"{name} = {width} by {ranks} ranks is no multiple of the quantization's group of {size}"
    return ""


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's part of a configuration."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


# The routing id of a follower on both connections is its rank in this many bytes.
RANK_BYTES: Final = 2


class Versions(msgspec.Struct, frozen=True, array_like=True):
    """Versions that must be equal on all ranks: results and the order of collectives depend on them."""

    mlxd: str
    mlx: str
    mlx_lm: str


class JoinGroup(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Message of a follower that has started.

    `info` is complete but for the size of its part. `form` is a digest of its model's files and of settings that affect
    results. `links` are the addresses `ip:port` where the follower will listen for a ring.
    """

    epoch: int
    info: RankInfo
    versions: Versions
    form: str
    links: tuple[str, ...] = ()


class StartLoading(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Command to connect by `backend` and to load, sent once all followers have joined.

    `links` has the addresses of each rank, indexed by rank.
    """

    backend: str
    parallel: str
    links: tuple[tuple[str, ...], ...] = ()
    coordinator: str = ""


class RankLoaded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Message of a follower that has loaded its part of the model.

    `needs_checkpoints` means that some layers can resume a prefix only at a checkpoint.
    """

    shard_bytes: int
    needs_checkpoints: bool


# The operations of a `TickPlan` follow. Rank 0 sends them in the order in which it did them.


class BeginGroup(msgspec.Struct, frozen=True, array_like=True, tag=16):
    """Operation: start a new batch without rows, with a new prefix cache of `cache_bytes`."""

    batch_mode: str
    cache_bytes: int
    needs_checkpoints: bool


class RowQuestion(msgspec.Struct, frozen=True, array_like=True):
    """Question behind a row's prompt: its tokens, to the end of the whole prompt, and the tokens of each label."""

    tokens: list[int]
    labels: list[list[int]]


class InsertRow(msgspec.Struct, frozen=True, array_like=True, tag=17):
    """Operation: add a row.

    Rank 0 found the row's first `reused` tokens in its prefix cache; followers must find them too. `top` is the number
    of top tokens per position of the row's prompt; None if the prompt is not scored. `questions` are those that the row
    has left, and `slices` the ends of the slices of its prompt.
    """

    rid: int
    prompt: list[int]
    output: list[int]
    max_tokens: int
    reused: int
    ignore_eos: bool = False
    stop_ids: tuple[int, ...] = ()
    boundaries: list[int] = []
    salt: str = ""
    top: int | None = None
    questions: list[RowQuestion] = []
    slices: list[int] = []


class RemoveRow(msgspec.Struct, frozen=True, array_like=True, tag=18):
    """Operation: remove a row before its end; its computed KV goes to the prefix cache."""

    rid: int


class ResizeCache(msgspec.Struct, frozen=True, array_like=True, tag=19):
    """Operation: set the budget of the prefix cache.

    If `token_bytes` is not 0, all ranks count these bytes per token, and `state_bytes` with `arrays` per checkpoint,
    regardless of the size of their parts.
    """

    cache_bytes: int
    token_bytes: int = 0
    state_bytes: int = 0
    arrays: int = 0


class ClearCache(msgspec.Struct, frozen=True, array_like=True, tag=20):
    """Operation: clear the prefix cache."""


class StoreEnded(msgspec.Struct, frozen=True, array_like=True, tag=21):
    """Operation: store the rows that have ended."""


# `SetMemory` sets the memory share of the ranks on rank 0's host, and is answered by `RankMemory`. `Shutdown` ends the
# group: a follower answers with `PlanDone`, and exits.
Op = BeginGroup | InsertRow | RemoveRow | ResizeCache | ClearCache | StoreEnded | SetMemory | Shutdown


class TickPlan(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Plan of one tick: operations, then a tick with at most `chunk` tokens of each prompt; 0 means no tick.

    `crc` covers all tokens generated up to the previous plan: a follower with another checksum must not run this plan.
    """

    seq: int
    crc: int
    ops: list[Op] = []
    chunk: int = 0
    is_fused: bool = True


class PlanDone(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Answer to a plan. `crc` covers all rids and ids generated so far."""

    seq: int
    crc: int
    step_us: int = 0
    memory: int = 0


class RankMemory(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Memory of a rank: KV bytes of a sequence by its length, and the rank's limits for KV and for prefixes.

    `windows` are (bytes per token, maximum tokens) of sliding windows; `widest` is the layer with the most bytes per
    token; `arrays` is the number of arrays in a cached prefix with a checkpoint.
    """

    token_bytes: int
    windows: tuple[tuple[int, int], ...]
    fixed_bytes: int
    widest: int
    arrays: int
    kv_bytes: int
    prefix_bytes: int


class RankHeartbeat(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Heartbeat, sent several times a second.

    `begun` and `done` identify the newest plans that this rank began and finished. `cpu_s` is the CPU time of the
    process since it began the current plan.
    """

    begun: int = 0
    done: int = 0
    cpu_s: float = 0.0


Down = StartLoading | TickPlan
Up = JoinGroup | RankLoaded | PlanDone | RankMemory
# `Goodbye` is the last message of a follower that cannot continue.
Watch = RankHeartbeat | Goodbye

_encoder: Final = msgspec.msgpack.Encoder()
_down: Final[msgspec.msgpack.Decoder[Down]] = msgspec.msgpack.Decoder(Down)
_up: Final[msgspec.msgpack.Decoder[Up]] = msgspec.msgpack.Decoder(Up)
_watch: Final[msgspec.msgpack.Decoder[Watch]] = msgspec.msgpack.Decoder(Watch)


def encode(message: Down | Up | Watch) -> bytes:
    return _encoder.encode(message)


def decode_down(frame: bytes) -> Down:
    """Decode a message of rank 0. Raises `MalformedFrame`."""
    return decode(_down, frame)


def decode_up(frame: bytes) -> Up:
    """Decode a follower's message. Raises `MalformedFrame`."""
    return decode(_up, frame)


def decode_watch(frame: bytes) -> Watch:
    """Decode a message of the watch. Raises `MalformedFrame`."""
    return decode(_watch, frame)


def identity(rank: int) -> bytes:
    """Return the routing id of a follower."""
    return rank.to_bytes(RANK_BYTES, "big")
