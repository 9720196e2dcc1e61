"""What this process holds, and the limits it lives within: its share of the memory, divided."""

import ctypes
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import mlx.core as mx
import psutil

from protocol.messages import SetMemory
from protocol.spec import WorkerSpec

log = logging.getLogger("mlxd.worker")

# Unset, MLX's free-buffer cache may grow to the whole machine. Too small a cache gives buffers back that the next step
# asks for again, which costs more than the step itself.
_CACHE_BYTES: Final = 1 << 30
_CACHE_PART: Final = 32
_LOAD_CACHE_BYTES: Final = 64 << 20
# Of a share, what weights and Python leave: this part for free buffers, and of the rest this part for KV.
_BUFFER_PART: Final = 8
_BUFFER_MIN: Final = 16 << 20
_KV_PART: Final = 0.75
# Python's own memory grows a little while requests come in.
_HOST_SLACK: Final = 16 << 20
_RUSAGE_INFO_V2: Final = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes: MLX's own counts, and what the system charges the process with."""

    active: int
    peak: int
    cache: int
    footprint: int

    @property
    def host(self) -> int:
        """What is not MLX's: Python, the tokenizer, libraries."""
        return max(0, self.footprint - self.active - self.cache)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bytes: for the KV of running rows, for cached prefixes, for free buffers, and for all that MLX allocates.

    `total` 0 leaves MLX its own limit, which is the machine's.
    """

    kv: int
    prefixes: int
    buffers: int
    total: int = 0


def divide(order: SetMemory, weights: int, host: int, *, kv: int = -1, prefixes: int = -1) -> Limits:
    """A share among its uses. `kv` and `prefixes` are the operator's word where they are not negative."""
    left = max(0, order.share_bytes - weights - host - _HOST_SLACK)
    buffers = min(_most_buffers(), max(_BUFFER_MIN, left // _BUFFER_PART))
    rest = max(0, left - buffers)
    own_kv = kv if kv >= 0 else int(rest * _KV_PART) if prefixes < 0 else max(0, rest - prefixes)
    own_prefixes = prefixes if prefixes >= 0 else max(0, rest - own_kv)
    total = max(weights, order.share_bytes - host)
    return Limits(int(own_kv * order.kv_part), int(own_prefixes * order.cache_part), buffers, total)


class Share:
    """The part of the machine's memory that this process was given. Owned by the engine thread."""

    def __init__(self, spec: WorkerSpec, weights: int) -> None:
        self._spec = spec
        self._weights = weights
        self._order = SetMemory(spec.memory_bytes)
        # What may be wired; 0 leaves it to MLX.
        self._wired = 0

    @property
    def bytes(self) -> int:
        return self._order.share_bytes

    @property
    def wired_limit(self) -> int:
        """What Metal may wire; 0 where it is not Metal's to say."""
        return self._wired if mx.metal.is_available() else 0

    def change(self, order: SetMemory) -> Limits:
        """Another share, or another part of it. Buffers that nobody uses go back to the system."""
        self._order = order
        limits = self.enforce()
        give_back()
        return limits

    def check(self) -> None:
        """Set the wired limit again if somebody has set another one since. Cheap; of use with Metal only."""
        if self._wired and mx.metal.is_available():
            _set_wired(self._wired)

    def enforce(self) -> Limits:
        """Give MLX its limits, and return all of them. To be called after whatever may have set them otherwise."""
        spec, order = self._spec, self._order
        if not order.share_bytes:
            machine = psutil.virtual_memory()
            # Half of what is free now, with the weights loaded, and an eighth of all there is.
            kv = spec.kv_bytes if spec.kv_bytes >= 0 else machine.available // 2
            prefixes = spec.cache_bytes if spec.cache_bytes >= 0 else machine.total // 8
            limits = Limits(kv, prefixes, _most_buffers())
        else:
            limits = divide(order, self._weights, measure().host, kv=spec.kv_bytes, prefixes=spec.cache_bytes)
        mx.set_cache_limit(limits.buffers)
        if limits.total:
            mx.set_memory_limit(limits.total)
            self._wired = self._weights + limits.kv + limits.prefixes
        self.check()
        return limits


def prepare_load() -> None:
    """Before weights are read: what one tensor leaves behind is of little use to the next."""
    mx.set_cache_limit(_LOAD_CACHE_BYTES)


def give_back() -> None:
    """What nobody uses goes to the system: MLX's free buffers, and what the C library keeps for later."""
    mx.clear_cache()
    give_back_heap()


def give_back_heap() -> None:
    """What the C library keeps for later goes to the system. For any thread."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library that is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def measure() -> Memory:
    return Memory(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), footprint())


def has_gpu() -> bool:
    """Whether MLX computes on Metal or CUDA."""
    return mx.default_device() != mx.Device(mx.cpu)


def footprint() -> int:
    """Private bytes of this process: physical footprint on macOS, resident minus shared on Linux."""
    return _darwin_footprint() if sys.platform == "darwin" else _linux_footprint()


def _set_wired(wanted: int) -> None:
    """Metal only, not run on Linux. Each `BatchGenerator` sets this to all that the GPU may wire when it is made."""
    most = int(mx.device_info().get("max_recommended_working_set_size", 0))
    limit = min(wanted, most)
    before = mx.set_wired_limit(limit)
    if before != limit:
        log.debug("wired limit: %d bytes instead of %d", limit, before)


def _most_buffers() -> int:
    return max(_CACHE_BYTES, psutil.virtual_memory().total // _CACHE_PART)


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
