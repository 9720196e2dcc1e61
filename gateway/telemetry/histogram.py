"""Histogram. An observation costs a bisection and two additions; `prometheus.py` exposes the counts."""

from bisect import bisect_left
from typing import Final

# Bounds in seconds, from one decode step on a fast machine to a load of a model from a cold disk.
LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
ITL_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Counts of observations by inclusive upper bound. Used on the event loop only."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return pairs of `le` and the number of observations up to it. The last pair is for +Inf."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else repr(float(bound)), total))
        return buckets
