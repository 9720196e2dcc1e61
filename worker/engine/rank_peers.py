"""Partners of an engine: the other ranks of its group, which do on their part of the model what its batch does."""

from collections.abc import Sequence
from typing import Any, Protocol

from protocol.stats import RankStats
from protocol.to_worker import SetMemory
from worker.engine.batch import Batch
from worker.engine.scheduling.kv_budget import KvCost
from worker.kv.kv import KvLayout
from worker.model.batch_mode import BatchMode
from worker.model.memory import ShareLimits
from worker.prefix_cache.prefix import PrefixCache


class RankPeers(Protocol):
    """Owned by the engine thread. What it makes tells them of all that is done with it."""

    def cache(self, layout: KvLayout, budget: int) -> PrefixCache:
        """A prefix cache, for the batch that is made next."""
        ...

    def batch(self, model: Any, eos_ids: Sequence[int], cache: PrefixCache, mode: BatchMode) -> Batch: ...

    def least(self, order: SetMemory, cost: KvCost, limits: ShareLimits) -> tuple[KvCost, ShareLimits]:
        """The most that a sequence costs on any rank, and the least room that any has, under an order of memory.

        `cost` and `limits` are this rank's.
        """
        ...

    def stats(self) -> tuple[RankStats, ...]:
        """Numbers of all ranks."""
        ...

    def leave(self) -> None:
        """End all of them, in order."""
        ...
