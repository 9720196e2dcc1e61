"""Counts of media that were decoded and encoded."""

from dataclasses import dataclass


@dataclass(slots=True)
class FeatureCounts:
    """Of media that rows needed features of: found here, and encoded for them. `seconds` were spent in the tower."""

    hits: int = 0
    misses: int = 0
    decoded: int = 0
    encoded: int = 0
    failed: int = 0
    evicted: int = 0
    seconds: float = 0.0
