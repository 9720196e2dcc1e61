"""Numbers that the engine thread writes and the IO threads read."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.stats import DraftStats, RankStats, Stats
from worker.prefix_cache.counts import CacheCounts, DiskCounts
from worker.vision.encoded import FeatureCounts

if TYPE_CHECKING:
    from worker.model.experts.expert_cache import ExpertCounts as ExpertCounts
    from worker.prefix_cache.prefix import PrefixCache
    from worker.sparse.chooser import SparseCounts as ChoiceCounts
    from worker.speculation.policy.speculator import Speculator
    from worker.vision.features import FeatureCache


@dataclass(slots=True)
class Gauges:
    """One writer, the engine; a torn read across fields is harmless. `busy_since` is 0 while the engine is idle.

    `repaired_messages` is the sending thread's, `refused_questions` the receiving one's, `undecoded` the decoders'.
    """

    running: int = 0
    waiting: int = 0
    step_seq: int = 0
    busy_since: float = 0.0
    kv_bytes: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    mem_active: int = 0
    mem_peak: int = 0
    mem_cache: int = 0
    footprint: int = 0
    kv_limit: int = 0
    kv_blocks: int = 0
    share_bytes: int = 0
    wired_limit: int = 0
    preemptions: int = 0
    malformed_tool_calls: int = 0
    repaired_messages: int = 0
    refused_questions: int = 0
    mem_limit: int = 0
    allocation_failures: int = 0
    cache_bytes: int = 0
    cache_nodes: int = 0
    cache: CacheCounts = field(default_factory=CacheCounts)
    disk: DiskCounts = field(default_factory=DiskCounts)
    speculator: "Speculator | None" = None
    kv_bits: int = 0
    choices: "ChoiceCounts | None" = None
    feature_bytes: int = 0
    features: FeatureCounts = field(default_factory=FeatureCounts)
    ranks: tuple[RankStats, ...] = ()
    heard_s: float = 0.0
    spoken_s: float = 0.0
    audio_s: float = 0.0
    experts: "ExpertCounts | None" = None
    # Requests that wait before the engine's queue, for a clip to be decoded.
    undecoded: int = 0

    def observe_cache(self, cache: "PrefixCache") -> None:
        self.cache_bytes, self.cache_nodes, self.cache = cache.nbytes, len(cache), cache.counts
        if cache.disk is not None:
            self.disk = cache.disk.counts

    def observe_features(self, features: "FeatureCache") -> None:
        self.feature_bytes, self.features = features.nbytes, features.counts

    def measure_memory(self) -> None:
        """Called on the engine thread, now and then."""
        from worker.model import memory  # MLX; this module is loaded before it is

        now = memory.measure()
        self.mem_active, self.mem_peak, self.mem_cache = now.active, now.peak, now.cache
        self.footprint = now.footprint

    def snapshot(self) -> Stats:
        busy_since = self.busy_since
        return Stats(
            running=self.running,
            waiting=self.waiting + self.undecoded,
            step_seq=self.step_seq,
            step_age_ms=int((time.monotonic() - busy_since) * 1e3) if busy_since else 0,
            mem_active=self.mem_active,
            mem_peak=self.mem_peak,
            mem_cache=self.mem_cache,
            footprint=self.footprint,
            kv_bytes=self.kv_bytes,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            cache_bytes=self.cache_bytes,
            cache_nodes=self.cache_nodes,
            cache_queries=self.cache.queries,
            cache_hits=self.cache.hits,
            cache_query_tokens=self.cache.query_tokens,
            cache_hit_tokens=self.cache.hit_tokens,
            cache_evictions=self.cache.evictions,
            cache_failures=self.cache.failures,
            kv_limit=self.kv_limit,
            preemptions=self.preemptions,
            malformed_tool_calls=self.malformed_tool_calls,
            disk_bytes=self.disk.bytes,
            disk_files=self.disk.files,
            disk_hits=self.cache.disk_hits,
            disk_restored_tokens=self.cache.disk_restored_tokens,
            disk_writes=self.disk.writes,
            disk_dropped=self.disk.dropped,
            disk_quarantined=self.disk.quarantined,
            share_bytes=self.share_bytes,
            wired_limit=self.wired_limit,
            repaired_messages=self.repaired_messages,
            refused_questions=self.refused_questions,
            mem_limit=self.mem_limit,
            allocation_failures=self.allocation_failures,
            drafted=self._drafted(),
            draft_width=self.speculator.width if self.speculator is not None else 0,
            draft_gain=round(self.speculator.gain, 3) if self.speculator is not None else 0.0,
            feature_bytes=self.feature_bytes,
            feature_hits=self.features.hits,
            feature_misses=self.features.misses,
            feature_evictions=self.features.evicted,
            media_decoded=self.features.decoded,
            media_encoded=self.features.encoded,
            media_failed=self.features.failed,
            encode_s=self.features.seconds,
            ranks=self.ranks,
            kv_bits=self.kv_bits,
            sparse_prompts=self.choices.prompts if self.choices is not None else 0,
            sparse_prompt_tokens=self.choices.tokens if self.choices is not None else 0,
            sparse_kept_tokens=self.choices.kept if self.choices is not None else 0,
            sparse_read_s=self.choices.seconds if self.choices is not None else 0.0,
            heard_s=round(self.heard_s, 3),
            spoken_s=round(self.spoken_s, 3),
            audio_s=round(self.audio_s, 3),
            kv_blocks=self.kv_blocks,
            expert_cache_bytes=self.experts.cache_bytes if self.experts is not None else 0,
            expert_hits=self.experts.hits if self.experts is not None else 0,
            expert_misses=self.experts.misses if self.experts is not None else 0,
            expert_evictions=self.experts.evictions if self.experts is not None else 0,
            expert_read_bytes=self.experts.read_bytes if self.experts is not None else 0,
        )

    def _drafted(self) -> tuple[DraftStats, ...]:
        if self.speculator is None:
            return ()
        return tuple(
            DraftStats(source, counts.drafts, counts.tokens, counts.accepted, tuple(counts.by_position))
            for source, counts in self.speculator.counts.items()
        )
