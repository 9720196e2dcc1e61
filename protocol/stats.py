"""Statistics that a worker sends of itself several times a second."""

from typing import Final

import msgspec

# Tokens of a block, in numbers for routers and in events of the prefix cache.
BLOCK: Final = 64


class DraftStats(msgspec.Struct, frozen=True, array_like=True):
    """Drafts of one source since the worker's start: how many, their tokens, and of these the accepted ones.

    `by_position` counts drafts of which the token at that place was accepted.
    """

    source: str
    drafts: int
    tokens: int
    accepted: int
    by_position: tuple[int, ...] = ()


class RankStats(msgspec.Struct, frozen=True, array_like=True):
    """One rank of a group: what MLX has allocated there, and the time of its newest step."""

    memory: int
    step_us: int = 0


class Stats(msgspec.Struct, frozen=True, array_like=True):
    """The worker's gauges; byte counts are MLX's own, `footprint` is what the system charges the process with."""

    running: int
    waiting: int
    step_seq: int
    step_age_ms: int
    mem_active: int
    mem_peak: int
    mem_cache: int
    footprint: int
    kv_bytes: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cache_bytes: int = 0
    cache_nodes: int = 0
    cache_queries: int = 0
    cache_hits: int = 0
    cache_query_tokens: int = 0
    cache_hit_tokens: int = 0
    cache_evictions: int = 0
    kv_limit: int = 0
    preemptions: int = 0
    malformed_tool_calls: int = 0
    disk_bytes: int = 0
    disk_files: int = 0
    disk_hits: int = 0
    disk_restored_tokens: int = 0
    disk_writes: int = 0
    disk_dropped: int = 0
    disk_quarantined: int = 0
    # The share of memory that it knows of, and how much of it Metal may wire; 0 where nothing is wired.
    share_bytes: int = 0
    wired_limit: int = 0
    # Messages that could not be sent as they were: not Unicode, or too large.
    repaired_messages: int = 0
    # Requests to count or decode tokens that found too many of them waiting.
    refused_questions: int = 0
    # What MLX may have allocated before it runs one operation at a time; 0 is its own limit, the machine's.
    mem_limit: int = 0
    # Steps that found no memory, after each of which KV got half.
    allocation_failures: int = 0
    drafted: tuple[DraftStats, ...] = ()
    # Tokens of a row in the newest step, and tokens a second of steps with drafts ÷ of steps without.
    draft_width: int = 0
    draft_gain: float = 0.0
    # Features of media: bytes kept, media that rows needed them of and found or did not find, and seconds of encoding.
    feature_bytes: int = 0
    feature_hits: int = 0
    feature_misses: int = 0
    feature_evictions: int = 0
    media_decoded: int = 0
    media_encoded: int = 0
    media_failed: int = 0
    encode_s: float = 0.0
    # Of a group, by rank.
    ranks: tuple[RankStats, ...] = ()
    # Bits of a number of the KV; 0 is as the model computes it.
    kv_bits: int = 0
    # Sparse prefills: prompts, their tokens and the kept ones, and seconds in which the draft model read prompts.
    sparse_prompts: int = 0
    sparse_prompt_tokens: int = 0
    sparse_kept_tokens: int = 0
    sparse_read_s: float = 0.0
    # Seconds of audio that were heard and spoken, and seconds of computing that took.
    heard_s: float = 0.0
    spoken_s: float = 0.0
    audio_s: float = 0.0
    # Experts on disk: bytes kept, experts that steps needed and found or did not find, and bytes that were read.
    expert_cache_bytes: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    expert_evictions: int = 0
    expert_read_bytes: int = 0
    # Blocks of `BLOCK` tokens that running rows and cached prefixes have room for, as one long sequence; 0 for a model
    # whose KV does not grow with the text.
    kv_blocks: int = 0
    # Failures to keep the KV of a row, or to take out a row that had ended.
    cache_failures: int = 0
