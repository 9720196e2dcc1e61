"""Statistics of a worker, which it sends several times a second.

Each statistic is declared once: its annotation has its Prometheus series, or the reason why it has none. The admin API
shows the statistics in `StatusStats`. A new statistic is appended to `Stats` and counted where it is measured; no other
list names it.
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final, Literal, get_type_hints

import msgspec

# Number of tokens per block in statistics for routers and in events of the prefix cache.
BLOCK: Final = 64


@dataclass(frozen=True, slots=True)
class Exported:
    """Series `mlxd_NAME` of a statistic and its help. Statistics that share a series differ in its label `kind`."""

    type: Literal["counter", "gauge"]
    name: str
    help: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Internal:
    """Statistic without a series, and the reason."""

    reason: str


_counter: Final = partial(Exported, "counter")
_gauge: Final = partial(Exported, "gauge")
_memory: Final = partial(Exported, "gauge", "worker_memory_bytes", "A worker's memory.")


def marks(struct: type[msgspec.Struct]) -> dict[str, Exported | Internal]:
    """Return the annotations of a struct of statistics by field."""
    hints = get_type_hints(struct, include_extras=True)
    return {
        name: hints[name].__metadata__[0] for name in struct.__struct_fields__ if hasattr(hints[name], "__metadata__")
    }


def series(struct: type[msgspec.Struct]) -> list[list[tuple[str, Exported]]]:
    """Return the series of a struct of statistics. Each series is a list of the fields that are its samples."""
    families: dict[str, list[tuple[str, Exported]]] = {}
    for name, mark in marks(struct).items():
        if isinstance(mark, Exported):
            families.setdefault(mark.name, []).append((name, mark))
    return list(families.values())


class DraftStats(msgspec.Struct, frozen=True, array_like=True):
    """Drafts of one source since the worker's start: number of drafts, of drafted tokens, and of accepted tokens.

    `by_position` counts drafts whose token at that position was accepted.
    """

    source: str
    drafts: Annotated[int, _counter("spec_decode_num_drafts", "Drafts of next tokens that were verified.")]
    tokens: Annotated[int, _counter("spec_decode_num_draft_tokens", "Tokens of drafts that were verified.")]
    accepted: Annotated[int, _counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.")]
    by_position: tuple[int, ...] = ()


class RankStats(msgspec.Struct, frozen=True, array_like=True):
    """Statistics of one rank of a group: memory that MLX has allocated, and the time of its newest step."""

    memory: int
    step_us: int = 0


class Stats(msgspec.Struct, array_like=True):
    """Statistics of a worker. Byte counts are MLX's own; `memory_bytes` is the memory that the system counts for the
    process.

    Not frozen: each part of a worker counts in an instance of its own, and their sum is sent. Counters begin at the
    worker's start. The order is the wire's: a new field is appended, with a default.
    """

    running: int = 0
    waiting: int = 0
    step_seq: Annotated[int, Internal("the proof that the loop lives")] = 0
    step_age_ms: int = 0
    active_bytes: Annotated[int, _memory("active")] = 0
    peak_bytes: Annotated[int, _memory("peak")] = 0
    cache_bytes: Annotated[int, _memory("cache")] = 0
    memory_bytes: Annotated[int, _memory("phys_footprint")] = 0
    kv_bytes: Annotated[int, _memory("kv")] = 0
    prompt_tokens: Annotated[int, Internal("the gateway counts them over restarts")] = 0
    generation_tokens: Annotated[int, Internal("the gateway counts them over restarts")] = 0
    prefix_bytes: Annotated[int, _memory("prefix_cache")] = 0
    prefix_nodes: Annotated[int, Internal("the size of the tree says nothing to an operator")] = 0
    prefix_queries: Annotated[int, Internal("counted in tokens, as vLLM does")] = 0
    prefix_hits: Annotated[int, Internal("counted in tokens, as vLLM does")] = 0
    prefix_query_tokens: Annotated[
        int, _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
    ] = 0
    prefix_hit_tokens: Annotated[int, _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")] = 0
    prefix_evictions: Annotated[int, _counter("prefix_cache_evictions", "Entries evicted from the prefix cache.")] = 0
    kv_limit: Annotated[int, Internal("a part of kv_cache_usage_perc")] = 0
    preemptions: Annotated[
        int, _counter("num_preemptions", "Running sequences preempted, for KV memory or because they are a batch's.")
    ] = 0
    malformed_tool_calls: Annotated[
        int,
        _counter("malformed_tool_calls", "Malformed tool calls: turned into text, closed, or finished as `length`."),
    ] = 0
    disk_bytes: Annotated[
        int, _gauge("prefix_cache_disk_bytes", "Size of the prefix cache on disk, as this worker sees it.")
    ] = 0
    disk_files: Annotated[int, Internal("mlxctl cache stats counts those of all models")] = 0
    disk_hits: Annotated[int, _counter("prefix_cache_disk_hits", "Prefixes restored from the disk cache.")] = 0
    # Tokens restored from disk, beyond the prefix that was already in memory.
    disk_restored_tokens: Annotated[
        int, _counter("prefix_cache_disk_restored", "Prompt tokens restored from the disk cache.")
    ] = 0
    disk_writes: Annotated[int, _counter("prefix_cache_disk_writes", "Files written to the disk cache.")] = 0
    disk_dropped: Annotated[
        int,
        _counter(
            "prefix_cache_disk_dropped", "Writes to the disk cache dropped because the disk was too slow or full."
        ),
    ] = 0
    disk_quarantined: Annotated[
        int,
        _counter(
            "prefix_cache_disk_quarantined", "Files of the disk cache set aside: corrupt, truncated, foreign or stale."
        ),
    ] = 0
    granted_bytes: Annotated[int, Internal("the worker's answer to its gateway's newest grant of memory")] = 0
    # Bytes of the worker's memory share that Metal may wire; 0 if nothing is wired.
    wired_limit: Annotated[int, _memory("wired_limit")] = 0
    repaired_messages: Annotated[
        int,
        _counter(
            "worker_repaired_messages", "Messages that a worker repaired before sending: not Unicode, or too large."
        ),
    ] = 0
    refused_tokenize_calls: Annotated[
        int,
        _counter(
            "worker_refused_questions",
            "Requests to count or decode tokens refused because too many were waiting.",
        ),
    ] = 0
    # Allocated bytes above which MLX runs one operation at a time; 0 is MLX's own limit.
    mem_limit: Annotated[int, _memory("limit")] = 0
    allocation_failures: Annotated[
        int,
        _counter(
            "worker_allocation_failures",
            "Steps whose memory allocation failed; each halves the KV budget of running requests for a while.",
        ),
    ] = 0
    drafted: Annotated[tuple[DraftStats, ...], Internal("its parts have series")] = ()
    draft_width: Annotated[
        int, _gauge("spec_width", "Tokens of a sequence in the newest step; 1 is a step without drafts.")
    ] = 0
    draft_gain: Annotated[
        float, _gauge("spec_gain_ratio", "Tokens a second of steps with drafts, divided by steps without.")
    ] = 0.0
    feature_bytes: Annotated[int, _memory("media_cache")] = 0
    feature_hits: Annotated[
        int, _counter("media_cache_hits", "Media whose features were found in the feature cache.")
    ] = 0
    feature_misses: Annotated[int, _counter("media_cache_misses", "Media whose features had to be made.")] = 0
    feature_evictions: Annotated[int, _counter("media_cache_evictions", "Media evicted from the feature cache.")] = 0
    media_decoded: Annotated[int, _counter("media_decoded", "Media decoded and resized.")] = 0
    media_encoded: Annotated[int, _counter("media_encoded", "Media encoded by a tower.")] = 0
    media_failed: Annotated[int, _counter("media_failed", "Media that could not be decoded or encoded.")] = 0
    encode_s: Annotated[
        float, _counter("media_encode_seconds", "Time in towers, which running sequences wait for.")
    ] = 0.0
    ranks: Annotated[tuple[RankStats, ...], Internal("the status of a model's group shows them")] = ()
    kv_bits: Annotated[
        int, _gauge("kv_cache_quantization", "Bits of a number of the KV; 0 is as the model computes it.")
    ] = 0
    sparse_prompts: Annotated[
        int, _counter("sparse_prefill_prompts", "Prompts of which a sparse prefill ran a part.")
    ] = 0
    sparse_prompt_tokens: Annotated[int, _counter("sparse_prefill_prompt_tokens", "Tokens of these prompts.")] = 0
    sparse_kept_tokens: Annotated[
        int, _counter("sparse_prefill_kept_tokens", "Tokens of these prompts that were kept.")
    ] = 0
    sparse_read_s: Annotated[
        float, _counter("sparse_prefill_read_seconds", "Seconds in which draft models read these prompts.")
    ] = 0.0
    heard_s: Annotated[
        float, _counter("audio_heard_seconds", "Seconds of clips that were transcribed or translated.")
    ] = 0.0
    spoken_s: Annotated[float, _counter("audio_spoken_seconds", "Seconds of speech that were synthesized.")] = 0.0
    audio_s: Annotated[
        float, _counter("audio_compute_seconds", "Time in which an audio model transcribed or synthesized speech.")
    ] = 0.0
    expert_cache_bytes: Annotated[
        int, _gauge("expert_cache_bytes", "Experts in memory, of a model whose experts are on disk.")
    ] = 0
    expert_hits: Annotated[int, _counter("expert_hits", "Experts that a step needed and found in memory.")] = 0
    expert_misses: Annotated[int, _counter("expert_misses", "Experts that a step needed and read from disk.")] = 0
    expert_evictions: Annotated[int, _counter("expert_evictions", "Experts dropped from memory for others.")] = 0
    expert_read_bytes: Annotated[int, _counter("expert_read_bytes", "Bytes of experts read from disk.")] = 0
    # Number of blocks that running rows and cached prefixes could fill as one long sequence; 0 if KV does not grow with
    # the text.
    kv_blocks: Annotated[int, Internal("a label of vllm:cache_config_info")] = 0
    prefix_failures: Annotated[
        int,
        _counter(
            "prefix_cache_failures",
            "Failures to cache a sequence's KV, which clear the prefix cache, or to release a sequence that has ended.",
        ),
    ] = 0
    attention_kernel: Annotated[int, _gauge("attention_kernel", "1 where mlxd's own kernel computes attention.")] = 0

    @property
    def drafted_tokens(self) -> int:
        return sum(each.tokens for each in self.drafted)

    @property
    def accepted_tokens(self) -> int:
        return sum(each.accepted for each in self.drafted)


class StatusStats(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics in a model's status, by their names in `Stats`; 0 while its worker does not run."""

    running: int = 0
    waiting: int = 0
    step_age_ms: int = 0
    memory_bytes: int = 0
    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0
    kv_bytes: int = 0
    # Number of tokens that were drafted.
    drafted_tokens: int = 0
    # Number of drafted tokens that were accepted.
    accepted_tokens: int = 0
    # Speed of steps with drafts, divided by the speed of steps without drafts.
    draft_gain: float = 0.0
    # Number of prompts with a sparse prefill.
    sparse_prompts: int = 0
    # Number of tokens in prompts with a sparse prefill.
    sparse_prompt_tokens: int = 0
    # Number of prompt tokens that a sparse prefill kept.
    sparse_kept_tokens: int = 0
