"""Percentiles, their summaries, and plain tables."""

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec


class Summary(msgspec.Struct, frozen=True):
    """A distribution in milliseconds. An empty one is all zeros, never NaN."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest-rank percentile, which is always one of `values`. Raises ValueError if `values` is empty."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    rank = max(1, math.ceil(percent / 100 * len(ordered)))
    return ordered[rank - 1]


def summarize_ms(seconds: Sequence[float]) -> Summary:
    """Summarize durations in seconds as milliseconds."""
    if not seconds:
        return Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    marks = (round(percentile(seconds, percent) * 1000, 3) for percent in (50, 90, 99, 100))
    return Summary(len(seconds), round(statistics.fmean(seconds) * 1000, 3), *marks)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Align columns: the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
