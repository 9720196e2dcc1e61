"""Memory of this machine and of processes. The calls for Darwin were not run on a Mac."""

import subprocess
import sys
from pathlib import Path
from typing import Final, Protocol

import psutil

from gateway.workers.supervisor.child import darwin_rusage

GIB: Final = 1 << 30
# Fraction of the memory that is reserved for the system and other programs, between RESERVE_MIN and RESERVE_MAX bytes.
RESERVE_PART: Final = 0.1
RESERVE_MIN: Final = GIB
RESERVE_MAX: Final = 16 * GIB
# Fraction of the memory that a Mac's GPU may wire by default (max_recommended_working_set_size).
WORKING_SET_PART: Final = 0.75
_CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_USES: Final = ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes")


class HostMemory(Protocol):
    """Memory of the machine; tests simulate a smaller machine."""

    def budget(self) -> int:
        """Return the default memory budget of all models together, in bytes."""
        ...

    def available(self) -> int:
        """Return the bytes that are free without swapping."""
        ...

    def footprint(self, pid: int) -> int:
        """Return the bytes that the end of process `pid` will free; 0 if there is no such process."""
        ...

    def unreturned(self, pid: int, footprint: int, available_before: int) -> int:
        """Return the bytes of an ended process that are not free yet."""
        ...


class ThisMachine:
    """Memory of the real machine. A failed read, as with too many open files, returns the previous result."""

    def __init__(self) -> None:
        self._free = 0
        self._footprints: dict[int, int] = {}

    def budget(self) -> int:
        if sys.platform == "darwin":
            return darwin_budget(_sysctl("iogpu.wired_limit_mb"), psutil.virtual_memory().total)
        return linux_budget([_read(path) for path in _CGROUP_LIMITS], psutil.virtual_memory().total)

    def available(self) -> int:
        try:
            free = psutil.virtual_memory().available
        except OSError:
            return self._free
        for limit_path, use_path in zip(_CGROUP_LIMITS, _CGROUP_USES, strict=True):
            limit, use = _number(_read(limit_path)), _number(_read(use_path))
            if limit is not None and use is not None:
                # The kernel drops cached file pages before it refuses memory.
                free = min(free, limit - use + _reclaimable(Path(use_path).parent / "memory.stat"))
        self._free = max(0, free)
        return self._free

    def footprint(self, pid: int) -> int:
        if sys.platform == "darwin":
            return _darwin_footprint(pid)
        try:
            footprint = _linux_footprint(pid)
        except OSError:
            return self._footprints.get(pid, 0)
        if footprint:
            self._footprints[pid] = footprint
        else:
            self._footprints.pop(pid, None)
        return footprint

    def unreturned(self, pid: int, footprint: int, available_before: int) -> int:
        if sys.platform == "darwin":
            # The freed bytes are measured, because wired memory of a killed process may be freed after its exit.
            return max(0, footprint - max(0, self.available() - available_before))
        return self.footprint(pid)


def linux_budget(limits: list[str | None], ram: int) -> int:
    """Compute the default budget. `limits` are the contents of the limit files of cgroup v2 and v1, None if missing."""
    known = [limit for text in limits if (limit := _number(text)) is not None]
    total = min([ram, *known])
    return total - _reserve(total)


def darwin_budget(wired_limit_mb: str | None, ram: int) -> int:
    """Compute the default budget. `wired_limit_mb` is the output of sysctl, where 0 means the system's default."""
    limit = (_number(wired_limit_mb) or 0) << 20
    return min(limit or int(ram * WORKING_SET_PART), ram - _reserve(ram))


def _reserve(total: int) -> int:
    return min(total // 2, max(RESERVE_MIN, min(RESERVE_MAX, int(total * RESERVE_PART))))


def _number(text: str | None) -> int | None:
    """Parse an integer. Return None for any other text, such as `max`, which means no limit in cgroup v2."""
    return int(text) if text is not None and text.strip().isdigit() else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return None


def _reclaimable(stat: Path) -> int:
    for line in (_read(str(stat)) or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return _number(value) or 0
    return 0


def _sysctl(name: str) -> str | None:
    # The PATH of a service has no /usr/sbin.
    try:
        done = subprocess.run(["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _linux_footprint(pid: int) -> int:
    """Return the anonymous bytes of a process. Pages of files are not its own: the system drops them when it needs to,
    and how many of them are shared depends on which other processes run.
    """
    try:
        memory = psutil.Process(pid).memory_info()
        return int(memory.rss - memory.shared)
    except psutil.Error:
        return 0


def _darwin_footprint(pid: int) -> int:
    """Return `ri_phys_footprint`: 8 bytes at offset 72 of rusage_info_v2."""
    return int.from_bytes(darwin_rusage(pid)[72:80], "little")
