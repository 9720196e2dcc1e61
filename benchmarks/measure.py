"""Variation between rounds, and CPU time of process trees. Percentiles are in `gateway.ctl.bench.measure`."""

import statistics
from collections.abc import Iterable, Sequence

import psutil


def spread(values: Sequence[float]) -> float:
    """(max - min) / median: how much a measurement moved between rounds."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def tree(pid: int) -> list[psutil.Process]:
    """The process and all below it; nothing when it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """User and system time of processes so far; those that are gone count nothing."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
