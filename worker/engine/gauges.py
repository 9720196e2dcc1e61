"""Statistics of a worker, written by its loop's thread and read by IO threads."""

import time
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import astuple

from protocol.stats import Stats

if TYPE_CHECKING:
    from worker.speculation.policy import Speculator


class Gauges(Stats):
    """Statistics of the loop. `snapshot` adds the statistics of the parts that count for themselves.

    Only the loop writes, and a torn read across fields is harmless. `repaired_messages` belongs to the sending thread,
    `refused_tokenize_calls` to the receiving one, `undecoded` to the decoders. `busy_since` is 0 while the loop is
    idle.
    """

    busy_since: float = 0.0
    # Requests whose clip waits to be decoded; they are not in the queue yet.
    undecoded: int = 0
    cache: Stats = msgspec.field(default_factory=Stats)
    disk: Stats = msgspec.field(default_factory=Stats)
    features: Stats = msgspec.field(default_factory=Stats)
    choices: Stats | None = None
    experts: Stats | None = None
    speculator: "Speculator | None" = None

    def measure_memory(self) -> None:
        """Measure the memory of this process. Called on the loop's thread."""
        from worker.model import memory  # this imports MLX, which is loaded after this module

        now = memory.measure()
        self.active_bytes, self.peak_bytes, self.cache_bytes = now.active, now.peak, now.cache
        self.memory_bytes = now.footprint

    def snapshot(self) -> Stats:
        """Return the present sums; floats, which are seconds and ratios, are rounded to three digits."""
        drafts = self.speculator.stats() if self.speculator is not None else None
        whole: tuple[Any, ...] = astuple(self)[: len(Stats.__struct_fields__)]
        for part in (self.cache, self.disk, self.features, self.choices, self.experts, drafts):
            if part is not None:
                # Only one part fills a given tuple field, so adding also works for tuples.
                whole = tuple(map(add, whole, astuple(part)))
        values: list[Any] = [round(value, 3) if isinstance(value, float) else value for value in whole]
        stats = Stats(*values)
        stats.waiting += self.undecoded
        if busy_since := self.busy_since:
            stats.step_age_ms = int((time.monotonic() - busy_since) * 1e3)
        return stats
