"""Memory limits of an engine: its process's share without the weights is divided into caches and the KV of running
rows."""

import functools
import logging
import time
import traceback
from collections.abc import Callable
from typing import Final

from protocol.spec import WorkerSpec
from protocol.stats import BLOCK
from worker.attention.kernel import bound_sums
from worker.engine.gauges import Gauges
from worker.engine.rank_peers import RankPeers
from worker.engine.scheduling.kv_budget import KvBudget, KvCost
from worker.engine.scheduling.timing_profile_file import open_kept
from worker.errors import is_allocation_failure
from worker.kv.quantized import make_caches
from worker.kv.spans_and_checkpoints import KvLayout
from worker.model import memory
from worker.model.loader import LoadedModel
from worker.prefix_cache.cache_and_eviction import PrefixCache
from worker.prefix_cache.fingerprint import form_of, open_disk
from worker.prefix_cache.kv_events import BlockEventLog
from worker.vision.encoder import FeatureCache

log = logging.getLogger("mlxd.worker")

_CHECK_INTERVAL_S: Final = 1.0


class MemoryLimits:
    """Caches and KV budget of one engine, with their limits. Owned by the engine thread.

    Other threads call `wake` when a read from disk has ended. `keeps` is the folder for timings that are saved for the
    next start; it is empty if none are saved.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        spec: WorkerSpec,
        gauges: Gauges,
        wake: Callable[[], None],
        keeps: str = "",
        partners: RankPeers | None = None,
        journal: BlockEventLog | None = None,
    ) -> None:
        self._model = loaded.model
        self._gauges = gauges
        self._partners = partners
        self._reuses_prefixes = loaded.plan.reuses_prefixes
        layout = KvLayout.of(lambda: make_caches(loaded.model))
        form = functools.cache(lambda: form_of(spec, loaded, layout))
        disk = open_disk(spec, form, layout, wake) if self._reuses_prefixes and partners is None else None
        self.kept = open_kept(keeps, form().key, spec) if keeps else None
        calibration = self.kept.calibration if self.kept is not None else None
        self.grant = memory.MemoryGrant(
            spec, loaded.weights_bytes, most_buffers=calibration.buffer_bytes if calibration is not None else 0
        )
        limits = self.grant.limits()
        self.grant.enforce(limits)
        # Cached features of media; None for a text model.
        self.features = FeatureCache(limits.features) if loaded.vision is not None else None
        budget = self._prefixes(limits)
        if partners is not None:
            self.cache = partners.cache(layout, budget)
        else:
            self.cache = PrefixCache(layout, budget, disk=disk, disk_min_tokens=spec.disk_cache_tokens, journal=journal)
        # The next two fields are set once the engine is warm.
        self.kv_cost: KvCost
        self.kv: KvBudget
        self._due = 0.0

    def apply(self, step: int, make_room: Callable[[], None]) -> None:
        """Apply the limits of the share. Memory above the limits is freed before MLX gets these limits.

        `step` is the maximum number of tokens of a row in one step; `make_room` preempts rows that do not fit the KV
        budget.
        """
        limits = self.grant.limits()
        if self._partners is not None:
            self.kv_cost, limits = self._partners.least(self.grant.order, self.kv_cost, limits)
        self.cache.arrays_per_row = self.kv_cost.arrays
        self.cache.resize(self._prefixes(limits))
        if self.features is not None:
            self.features.resize(limits.features)
        self.kv = KvBudget(self.kv_cost, limits.kv, limits.buffers, step)
        bound_sums(self._model, limits.buffers)
        self._gauges.kv_limit = limits.kv
        self._gauges.kv_blocks = self.kv_cost.blocks(limits.kv + self.cache.budget, BLOCK)
        make_room()
        self.grant.enforce(limits)
        self._gauges.granted_bytes = self.grant.bytes
        self._gauges.mem_limit = limits.total
        self._gauges.wired_limit = self.grant.wired_limit

    def relax(self) -> bool:
        """Periodically lower the wired limit. Returns whether limits that a failed allocation halved may grow again."""
        now = time.monotonic()
        if now < self._due:
            return False
        self._due = now + _CHECK_INTERVAL_S
        self.grant.check()
        self._gauges.wired_limit = self.grant.wired_limit
        return self.grant.relax(now)

    def shrink(self, error: Exception, action: str) -> bool:
        """Clear the caches and halve the limits after a failed allocation. The caller must then call `apply`.

        Returns False if `error` is no failed allocation, or if the limits are at their minimum.
        """
        if not is_allocation_failure(error) or not self.grant.shrink(time.monotonic()):
            return False
        self._gauges.allocation_failures += 1
        log.warning("%s failed to allocate memory; the KV budget is halved: %s", action, error)
        traceback.clear_frames(error.__traceback__)  # frames hold computed arrays
        self.clear()
        return True

    def clear(self) -> None:
        """Free all cached memory that no row needs."""
        self.cache.clear()
        if self.features is not None:
            self.features.clear()

    def observe(self) -> None:
        """Update the gauges of the caches."""
        gauges, cache = self._gauges, self.cache
        gauges.prefix_bytes, gauges.prefix_nodes, gauges.cache = cache.nbytes, len(cache), cache.counts
        if cache.disk is not None:
            gauges.disk = cache.disk.counts
        if self.features is not None:
            gauges.feature_bytes, gauges.features = self.features.nbytes, self.features.counts

    def _prefixes(self, limits: memory.AllocationLimits) -> int:
        """Return the budget of the prefix cache: the memory for all caches minus the memory for media features."""
        if not self._reuses_prefixes:
            return 0
        return limits.prefixes - (limits.features if self.features is not None else 0)
