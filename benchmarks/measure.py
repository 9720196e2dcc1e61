"""Variation between rounds, CPU time of process trees, and waits. Percentiles are in
`gateway.ctl.bench.closed_loop`."""

import asyncio
import statistics
from collections.abc import Callable, Iterable, Sequence

import psutil


def spread(values: Sequence[float]) -> float:
    """Return (max - min) / median, the variation of a measurement between rounds."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


async def until(condition: Callable[[], bool], poll_s: float = 0.005) -> None:
    """Wait for a condition that callbacks make true."""
    while not condition():  # noqa: ASYNC110 (an event would wake a task for each token)
        await asyncio.sleep(poll_s)


def tree(pid: int) -> list[psutil.Process]:
    """Return the process and all its descendants; nothing if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """Return the user and system time of processes so far; processes that ended count as 0."""
    total = 0.0
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total
