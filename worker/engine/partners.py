"""Partners of an engine: the other ranks of its group, which do on their part of the model what its batch does."""

from collections.abc import Sequence
from typing import Any, Protocol

from protocol.messages import SetMemory
from protocol.stats import RankStats
from worker.cache.kv import Layout
from worker.cache.prefix import PrefixCache
from worker.engine.batch import Batch
from worker.engine.kv_budget import KvCost
from worker.model.lanes import Lane
from worker.model.memory import Limits


class Partners(Protocol):
    """Owned by the engine thread. What it makes tells them of all that is done with it."""

    def cache(self, layout: Layout, budget: int) -> PrefixCache:
        """A prefix cache, for the batch that is made next."""
        ...

    def batch(self, model: Any, eos_ids: Sequence[int], cache: PrefixCache, lane: Lane) -> Batch: ...

    def least(self, order: SetMemory, cost: KvCost, limits: Limits) -> tuple[KvCost, Limits]:
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
