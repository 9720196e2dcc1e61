"""Memory of this process: measured use, and the division of its grant into limits."""

import ctypes
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import mlx.core as mx
import psutil
from mlx_lm.generate import generation_stream
from msgspec import structs

from protocol.spec import WorkerSpec
from protocol.to_worker import SetMemory

log = logging.getLogger("mlxd.worker")

# Minimum of the default limit of MLX's free buffers. Without a limit, these buffers may grow to the machine's whole
# memory. With too low a limit, MLX releases buffers that the next step allocates again, which costs more than the step
# itself.
_MIN_USUAL_BUFFERS_BYTES: Final = 1 << 30
_USUAL_BUFFERS_DIVISOR: Final = 32
_LOAD_BUFFERS_BYTES: Final = 64 << 20
# Free buffers get the part of a grant that weights and Python leave, divided by this number.
_BUFFERS_DIVISOR: Final = 8
_MIN_BUFFERS_BYTES: Final = 16 << 20
# Fraction of the memory for KV and prefixes that is for KV, if the operator sets neither.
_KV_FRACTION: Final = 0.75
# Features of media get the memory for prefixes, divided by this number.
_FEATURES_DIVISOR: Final = 8
# Features get at least this many bytes, but at most half of the memory for prefixes.
_MIN_FEATURES_BYTES: Final = 64 << 20
# Allowance in bytes for the growth of Python's own memory as requests arrive.
_HOST_GROWTH_BYTES: Final = 16 << 20
# Each failed allocation halves the memory of KV and prefixes, down to this fraction.
_MIN_SHRUNK_FRACTION: Final = 0.125
# The memory of KV and prefixes doubles again after each interval of this length without a failed allocation.
_REGROW_INTERVAL_S: Final = 300.0
_RUSAGE_INFO_V2: Final = 2


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory use in bytes: MLX's own counts, and the footprint that the system reports."""

    active: int
    peak: int
    cache: int
    footprint: int

    @property
    def host(self) -> int:
        """Memory outside MLX: Python, the tokenizer, libraries."""
        return max(0, self.footprint - self.active - self.cache)


@dataclass(frozen=True, slots=True)
class AllocationLimits:
    """Limits in bytes: KV of running rows, cached prefixes, free buffers, and all allocations of MLX.

    If `total` is 0, MLX keeps its own limit for this machine. Otherwise `total` is at least the sum of weights, KV,
    prefixes and the temporary arrays of a step. These arrays use the memory for free buffers. Above `total`, MLX runs
    one operation at a time.
    """

    kv: int
    prefixes: int
    buffers: int
    total: int = 0

    @property
    def features(self) -> int:
        """Bytes of `prefixes` that are for features of media, if the model has a tower."""
        return max(self.prefixes // _FEATURES_DIVISOR, min(_MIN_FEATURES_BYTES, self.prefixes // 2))


def divide(
    order: SetMemory,
    weights: int,
    host: int,
    *,
    kv: int = -1,
    prefixes: int = -1,
    most_buffers: int = 0,
    is_bounded: bool = False,
) -> AllocationLimits:
    """Divide a grant into limits. `kv` and `prefixes` are the operator's settings; a negative value means that there is
    none.

    With `is_bounded`, the settings are those of another machine's operator, so they are limited to what is left of this
    grant. `most_buffers` is the limit of free buffers; 0 means the usual limit.
    """
    left = max(0, order.memory_bytes - weights - host - _HOST_GROWTH_BYTES)
    buffers = min(most_buffers or usual_buffers(), max(_MIN_BUFFERS_BYTES, left // _BUFFERS_DIVISOR))
    rest = max(0, left - buffers)
    own_kv = kv if kv >= 0 else int(rest * _KV_FRACTION) if prefixes < 0 else max(0, rest - prefixes)
    own_prefixes = prefixes if prefixes >= 0 else max(0, rest - own_kv)
    if is_bounded:
        own_kv = min(own_kv, rest)
        own_prefixes = min(own_prefixes, rest - own_kv)
    own_kv, own_prefixes = int(own_kv * order.kv_part), int(own_prefixes * order.cache_part)
    total = max(weights + own_kv + own_prefixes + buffers, order.memory_bytes - host)
    return AllocationLimits(own_kv, own_prefixes, buffers, total)


class MlxDevice:
    """Memory limits of MLX's device. Wired memory exists on Metal only."""

    def wirable(self) -> int:
        """Return the maximum number of bytes that may be wired; 0 without Metal."""
        if not mx.metal.is_available():
            return 0
        return int(mx.device_info().get("max_recommended_working_set_size", 0))

    def active(self) -> int:
        return mx.get_active_memory()

    def synchronize(self) -> None:
        """Wait for the current step: wired memory must not change during a step."""
        mx.synchronize(generation_stream)

    def clear_cache(self) -> None:
        give_back()

    def set_cache_limit(self, limit: int) -> None:
        mx.set_cache_limit(limit)

    def set_memory_limit(self, limit: int) -> None:
        mx.set_memory_limit(limit)

    def set_wired_limit(self, limit: int) -> None:
        before = mx.set_wired_limit(limit)
        if before != limit:
            log.debug("wired limit: %d bytes instead of %d", limit, before)


class MemoryGrant:
    """Share of the machine's memory that this process may use. Owned by the engine thread.

    `limits` returns the limits to reach; once memory is within them, `enforce` sets the limits of MLX. When the wired
    limit falls below what is wired, Metal unwires allocations in no defined order, weights among them, and rewires them
    only when the limit grows. So the wired limit is only lowered to what is in use; a later `check` lowers it further.
    """

    def __init__(self, spec: WorkerSpec, weights: int, device: MlxDevice | None = None, most_buffers: int = 0) -> None:
        """`most_buffers` is the limit of free buffers that was measured as fastest; 0 means the usual limit."""
        self._spec = spec
        self._most_buffers = most_buffers
        self._weights = weights
        self._device = device or MlxDevice()
        self._is_remote = spec.group is not None and spec.rank is not None and spec.group.is_remote(spec.rank.rank)
        self.order = SetMemory(spec.memory_bytes)
        # Wired limit that the current grant asks for; 0 leaves the limit to MLX.
        self._wanted = 0
        # Wired limit that is set in Metal.
        self._wired = 0
        # Fraction of the memory for KV and prefixes that is in use; failed allocations lower it.
        self._part = 1.0
        self._relaxes_at = 0.0

    @property
    def bytes(self) -> int:
        return self.order.memory_bytes

    @property
    def wired_limit(self) -> int:
        """Metal's wired limit in bytes; 0 without Metal."""
        return self._wired

    def change(self, order: SetMemory) -> AllocationLimits:
        """Change the grant, or the parts of it that may be used. Returns the limits to reach before `enforce`."""
        if self._is_remote:
            # The grant in the order is that of another machine's ranks; only the order's `kv_part` and `cache_part`
            # apply here.
            parts = (min(1.0, max(0.0, part)) for part in (order.kv_part, order.cache_part))
            order = SetMemory(self._spec.memory_bytes, *parts)
        self.order = order
        return self.limits()

    def weigh(self, weights: int) -> AllocationLimits:
        """Set the size of the weights in bytes. Returns the limits to reach before `enforce`."""
        self._weights = weights
        return self.limits()

    def shrink(self, now: float) -> bool:
        """Halve the memory of KV and prefixes for a while after a failed allocation. Returns False at the minimum."""
        if self._part <= _MIN_SHRUNK_FRACTION:
            return False
        self._part, self._relaxes_at = self._part / 2, now + _REGROW_INTERVAL_S
        return True

    def relax(self, now: float) -> bool:
        """Undo one `shrink` if its interval has passed. Returns whether it was undone."""
        if self._part == 1.0 or now < self._relaxes_at:
            return False
        self._part, self._relaxes_at = self._part * 2, now + _REGROW_INTERVAL_S
        return True

    def limits(self) -> AllocationLimits:
        limits = self._divide()
        return replace(limits, kv=int(limits.kv * self._part), prefixes=int(limits.prefixes * self._part))

    def _divide(self) -> AllocationLimits:
        spec, order = self._spec, self.order
        # Each rank of a group gets an equal part of the operator's limits, and of its host's grant.
        ranks = spec.group.size if spec.group else 1
        beside = spec.group.beside(spec.rank.rank) if spec.group and spec.rank else 1
        own_kv, own_prefixes = spec.kv_bytes // ranks, spec.cache_bytes // ranks
        if order.memory_bytes:
            order = structs.replace(order, memory_bytes=order.memory_bytes // beside)
            host, most = measure().host, self._most_buffers
            return divide(
                order,
                self._weights,
                host,
                kv=own_kv,
                prefixes=own_prefixes,
                most_buffers=most,
                is_bounded=self._is_remote,
            )
        machine = psutil.virtual_memory()
        # The default for KV is half of the memory that is free once the weights are loaded; for prefixes it is an
        # eighth of all memory.
        kv = own_kv if own_kv >= 0 else machine.available // (2 * beside)
        prefixes = own_prefixes if own_prefixes >= 0 else machine.total // (8 * beside)
        return AllocationLimits(kv, prefixes, self._most_buffers or usual_buffers())

    def enforce(self, limits: AllocationLimits) -> None:
        """Set the limits of MLX, and return unused buffers to the system.

        The caller must first free everything above the limits.
        """
        device = self._device
        device.clear_cache()
        device.set_cache_limit(limits.buffers)
        if limits.total:
            device.set_memory_limit(limits.total)
            self._wanted = min(self._weights + limits.kv + limits.prefixes + limits.buffers, device.wirable())
            self._wire(is_new=True)

    def check(self) -> None:
        """Lower the wired limit if `enforce` could not lower it enough. The call is cheap, and has no effect except on
        Metal."""
        if self._wired != self._wanted:
            self._wire()

    def _wire(self, *, is_new: bool = False) -> None:
        device, wanted = self._device, self._wanted
        if not wanted:
            return
        if wanted < self._wired and device.active() > wanted:
            device.synchronize()  # freed memory is only available after the step that last used it
            if device.active() > wanted:
                wanted = self._wired
        if is_new or wanted != self._wired:
            device.synchronize()
            device.set_wired_limit(wanted)
            self._wired = wanted


def prepare_load() -> None:
    """Limit free buffers before weights are read, because the buffer of one tensor rarely fits the next tensor."""
    mx.set_cache_limit(_LOAD_BUFFERS_BYTES)


def give_back() -> None:
    """Return unused memory to the system: MLX's free buffers and the C library's free heap."""
    mx.clear_cache()
    give_back_heap()


def give_back_heap() -> None:
    """Return the C library's free heap to the system. Callable from any thread."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def measure() -> Memory:
    return Memory(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), footprint())


def allowed(spec: WorkerSpec) -> int:
    """Return the number of bytes that this process may use: the specification's limit, or else the machine's whole
    memory."""
    return spec.memory_bytes or psutil.virtual_memory().total


def has_gpu() -> bool:
    """Whether MLX computes on Metal or CUDA."""
    return mx.default_device() != mx.Device(mx.cpu)


def footprint() -> int:
    """Return the private bytes of this process: physical footprint on macOS, resident minus shared on Linux."""
    return _darwin_footprint() if sys.platform == "darwin" else _linux_footprint()


def usual_buffers() -> int:
    """Return the limit of free buffers, in bytes, that applies if no limit was measured."""
    return max(_MIN_USUAL_BUFFERS_BYTES, psutil.virtual_memory().total // _USUAL_BUFFERS_DIVISOR)


def _linux_footprint() -> int:
    fields = Path("/proc/self/statm").read_bytes().split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _darwin_footprint() -> int:
    """Read `ri_phys_footprint` from offset 72 of rusage_info_v2 (proc_pid_rusage in libproc.h). Not run on Linux."""
    buffer = ctypes.create_string_buffer(512)
    libproc = ctypes.CDLL("/usr/lib/libproc.dylib")
    if libproc.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V2, buffer) != 0:
        return 0
    return int.from_bytes(buffer.raw[72:80], "little")
