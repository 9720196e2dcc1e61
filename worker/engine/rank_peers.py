"""Port of an engine to the other ranks of its group, which repeat the work of its batch on their part of the model."""

from collections.abc import Sequence
from typing import Any, Protocol

from protocol.stats import RankStats
from protocol.to_worker import SetMemory
from worker.engine.batch import Batch
from worker.engine.scheduling.kv_budget import KvCost
from worker.kv.spans_and_checkpoints import KvLayout
from worker.model.batch_mode import BatchMode
from worker.model.memory import AllocationLimits
from worker.prefix_cache.cache_and_eviction import PrefixCache


class RankPeers(Protocol):
    """The other ranks. Caches and batches that this object makes report their operations to them. Owned by the engine
    thread."""

    def cache(self, layout: KvLayout, budget: int) -> PrefixCache:
        """Return a prefix cache for the next batch."""
        ...

    def batch(self, model: Any, eos_ids: Sequence[int], cache: PrefixCache, mode: BatchMode) -> Batch: ...

    def least(self, order: SetMemory, cost: KvCost, limits: AllocationLimits) -> tuple[KvCost, AllocationLimits]:
        """Return the largest cost of a sequence and the smallest memory limits of all ranks.

        `cost` and `limits` are this rank's own.
        """
        ...

    def stats(self) -> tuple[RankStats, ...]:
        """Return the statistics of all ranks."""
        ...

    def leave(self) -> None:
        """End all ranks in order."""
        ...
