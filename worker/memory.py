"""What this process holds, and the limits MLX is given."""

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx
import psutil

# Unset, MLX's free-buffer cache may grow to the whole machine.
_MIN_CACHE_BYTES: Final = 1 << 30
_CACHE_SHARE: Final = 32
_RUSAGE_INFO_V2: Final = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: MLX's own counts, and what the system charges the process with."""

    active: int
    peak: int
    cache: int
    footprint: int


def measure() -> Memory:
    return Memory(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), footprint())


def has_gpu() -> bool:
    """Whether MLX computes on Metal or CUDA."""
    return mx.default_device() != mx.Device(mx.cpu)


def limit_cache() -> int:
    """Bound MLX's free-buffer cache to a share of the machine's memory; returns the limit in bytes.

    Too small a cache gives buffers back that the next step asks for again, which costs more than the step itself.
    """
    limit = max(_MIN_CACHE_BYTES, psutil.virtual_memory().total // _CACHE_SHARE)
    mx.set_cache_limit(limit)
    return limit


def cache_budget(wanted: int) -> int:
    """Bytes for the prefix cache; -1 means an eighth of the machine's memory."""
    return wanted if wanted >= 0 else psutil.virtual_memory().total // 8


def kv_budget(wanted: int) -> int:
    """Bytes of KV for running rows; -1 means half of the memory that is free now, with the weights loaded."""
    return wanted if wanted >= 0 else psutil.virtual_memory().available // 2


def footprint() -> int:
    """Private bytes of this process: physical footprint on macOS, resident minus shared on Linux."""
    return _darwin_footprint() if sys.platform == "darwin" else _linux_footprint()


def _linux_footprint() -> int:
    fields = Path("/proc/self/statm").read_bytes().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _darwin_footprint() -> int:
    """`ri_phys_footprint` of proc_pid_rusage (libproc.h): 8 bytes at offset 72 of rusage_info_v2. Not run on Linux."""
    buffer = ctypes.create_string_buffer(512)
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
    if libproc.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V2, buffer) != 0:
        return 0
    return int.from_bytes(buffer.raw[72:80], "little")
