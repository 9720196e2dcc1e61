"""Numbers that the engine thread writes and the IO threads read."""

import time
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import astuple

from protocol.stats import Stats

if TYPE_CHECKING:
    from worker.prefix_cache.prefix import PrefixCache
    from worker.speculation.policy.speculator import Speculator
    from worker.vision.features import FeatureCache


class Gauges(Stats):
    """The engine's own statistics, and those of the parts that count for themselves: the sum of all is sent.

    One writer, the engine; a torn read across fields is harmless. `repaired_messages` is the sending thread's,
    `refused_questions` the receiving one's, `undecoded` the decoders'. `busy_since` is 0 while the engine is idle.
    """

    busy_since: float = 0.0
    # Requests that wait before the engine's queue, for a clip to be decoded.
    undecoded: int = 0
    cache: Stats = msgspec.field(default_factory=Stats)
    disk: Stats = msgspec.field(default_factory=Stats)
    features: Stats = msgspec.field(default_factory=Stats)
    choices: Stats | None = None
    experts: Stats | None = None
    speculator: "Speculator | None" = None

    def observe_cache(self, cache: "PrefixCache") -> None:
        self.prefix_bytes, self.prefix_nodes, self.cache = cache.nbytes, len(cache), cache.counts
        if cache.disk is not None:
            self.disk = cache.disk.counts

    def observe_features(self, features: "FeatureCache") -> None:
        self.feature_bytes, self.features = features.nbytes, features.counts

    def measure_memory(self) -> None:
        """Called on the engine thread, now and then."""
        from worker.model import memory  # MLX; this module is loaded before it is

        now = memory.measure()
        self.active_bytes, self.peak_bytes, self.cache_bytes = now.active, now.peak, now.cache
        self.memory_bytes = now.footprint

    def snapshot(self) -> Stats:
        """The sums of now; floats, which are seconds and ratios, to three digits."""
        drafts = self.speculator.stats() if self.speculator is not None else None
        whole: tuple[Any, ...] = astuple(self)[: len(Stats.__struct_fields__)]
        for part in (self.cache, self.disk, self.features, self.choices, self.experts, drafts):
            if part is not None:
                # Tuples of a part, of which it alone has any, are added too.
                whole = tuple(map(add, whole, astuple(part)))
        values: list[Any] = [round(value, 3) if isinstance(value, float) else value for value in whole]
        stats = Stats(*values)
        stats.waiting += self.undecoded
        if busy_since := self.busy_since:
            stats.step_age_ms = int((time.monotonic() - busy_since) * 1e3)
        return stats
