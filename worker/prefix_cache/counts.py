"""Counters of the prefix cache; free of MLX, so that the IO threads can hold them before the model is loaded."""

from dataclasses import dataclass


@dataclass(slots=True)
class CacheCounts:
    """Counts since the worker started."""

    queries: int = 0
    hits: int = 0
    query_tokens: int = 0
    hit_tokens: int = 0
    evictions: int = 0
    # Hits that took something from the disk, and the tokens that these had more than memory alone would have given.
    disk_hits: int = 0
    disk_restored_tokens: int = 0
    # Failures to keep the KV of a row, or to take out a row that had ended.
    failures: int = 0


@dataclass(slots=True)
class DiskCounts:
    """Of the disk cache. `files` and `bytes` are this model's, now; the others count since the worker started."""

    files: int = 0
    bytes: int = 0
    writes: int = 0
    dropped: int = 0
    # Files that are set aside: corrupt, truncated or foreign ones, and what the model left in another form.
    quarantined: int = 0
