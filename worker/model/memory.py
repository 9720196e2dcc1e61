"""Memory of this process: measured use, and the limits that its share is divided into."""

import ctypes
import logging
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

import mlx.core as mx
import psutil
from mlx_lm.generate import generation_stream
from msgspec import structs

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
# Of what is for prefixes, this part is for features of media, and if there is enough, at least so much.
_FEATURE_PART: Final = 8
_FEATURES_MIN: Final = 64 << 20
# Python's own memory grows a little while requests come in.
_HOST_SLACK: Final = 16 << 20
# After a failed allocation KV and prefixes get half, an eighth at least, and twice as much again after so long without.
_LEAST_PART: Final = 0.125
_RELAX_S: Final = 300.0
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
        """Memory outside of MLX: Python, the tokenizer, libraries."""
        return max(0, self.footprint - self.active - self.cache)


@dataclass(frozen=True, slots=True)
class ShareLimits:
    """Bytes: for the KV of running rows, for cached prefixes, for free buffers, and for all that MLX allocates.

    `total` 0 leaves MLX its own limit, which is the machine's. It is never less than weights, KV, prefixes and what
    passes in a step, which has the room of the free buffers: over it, MLX runs one operation at a time.
    """

    kv: int
    prefixes: int
    buffers: int
    total: int = 0

    @property
    def features(self) -> int:
        """Bytes that features of media take of `prefixes`, for a model that has a tower."""
        return max(self.prefixes // _FEATURE_PART, min(_FEATURES_MIN, self.prefixes // 2))


def divide(
    order: SetMemory,
    weights: int,
    host: int,
    *,
    kv: int = -1,
    prefixes: int = -1,
    most_buffers: int = 0,
    is_bounded: bool = False,
) -> ShareLimits:
    """A share among its uses. `kv` and `prefixes` are the operator's word where they are not negative; where the share
    `is_bounded`, as that of a rank on another machine, no more than what is left of it.

    `most_buffers` is the limit of free buffers; 0 is the usual one.
    """
    left = max(0, order.share_bytes - weights - host - _HOST_SLACK)
    buffers = min(most_buffers or usual_buffers(), max(_BUFFER_MIN, left // _BUFFER_PART))
    rest = max(0, left - buffers)
    own_kv = kv if kv >= 0 else int(rest * _KV_PART) if prefixes < 0 else max(0, rest - prefixes)
    own_prefixes = prefixes if prefixes >= 0 else max(0, rest - own_kv)
    if is_bounded:
        own_kv = min(own_kv, rest)
        own_prefixes = min(own_prefixes, rest - own_kv)
    own_kv, own_prefixes = int(own_kv * order.kv_part), int(own_prefixes * order.cache_part)
    total = max(weights + own_kv + own_prefixes + buffers, order.share_bytes - host)
    return ShareLimits(own_kv, own_prefixes, buffers, total)


class Device(Protocol):
    """Port for memory limits: MLX, or a test's record of them."""

    def wirable(self) -> int:
        """The most that may be wired; 0 where that is not Metal's to say."""
        ...

    def active(self) -> int: ...

    def synchronize(self) -> None: ...

    def clear_cache(self) -> None: ...

    def set_cache_limit(self, limit: int) -> None: ...

    def set_memory_limit(self, limit: int) -> None: ...

    def set_wired_limit(self, limit: int) -> None: ...


class MlxDevice:
    """MLX itself. What concerns wiring is of Metal only, and not run on Linux."""

    def wirable(self) -> int:
        if not mx.metal.is_available():
            return 0
        return int(mx.device_info().get("max_recommended_working_set_size", 0))

    def active(self) -> int:
        return mx.get_active_memory()

    def synchronize(self) -> None:
        """Wait for the step that is under way: it must not meet a change of what is wired."""
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


class MemoryShare:
    """The part of the machine's memory that this process was given. Owned by the engine thread.

    `limits` says what is to be held; when that is so, `enforce` tells MLX. When the wired limit falls below what is
    wired, Metal takes allocations out in no order, weights among them, and puts them back only when it grows: so it is
    lowered only to what is held already, and else by a later `check`.
    """

    def __init__(self, spec: WorkerSpec, weights: int, device: Device | None = None, most_buffers: int = 0) -> None:
        """`most_buffers` is a limit of free buffers that was measured to be the quickest; 0 for the usual one."""
        self._spec = spec
        self._most_buffers = most_buffers
        self._weights = weights
        self._device = device or MlxDevice()
        self._is_remote = spec.rank is not None and spec.rank.is_remote
        self.order = SetMemory(spec.memory_bytes)
        # What may be wired, and what Metal was told of it; 0 leaves it to MLX.
        self._wanted = 0
        self._wired = 0
        # Of KV and prefixes, since an allocation failed.
        self._part = 1.0
        self._relaxes_at = 0.0

    @property
    def bytes(self) -> int:
        return self.order.share_bytes

    @property
    def wired_limit(self) -> int:
        """Metal's wired limit in bytes; 0 without Metal."""
        return self._wired

    def change(self, order: SetMemory) -> ShareLimits:
        """Another share, or another part of it: the limits to keep before `enforce`."""
        if self._is_remote:
            # The order of another machine, whose share is none of ours.
            parts = (min(1.0, max(0.0, part)) for part in (order.kv_part, order.cache_part))
            order = SetMemory(self._spec.memory_bytes, *parts)
        self.order = order
        return self.limits()

    def weigh(self, weights: int) -> ShareLimits:
        """Other weights beside what is to be held: the limits to keep before `enforce`."""
        self._weights = weights
        return self.limits()

    def shrink(self, now: float) -> bool:
        """Half of KV and prefixes for a while, because an allocation has failed; False where that was done before and
        is of no help."""
        if self._part <= _LEAST_PART:
            return False
        self._part, self._relaxes_at = self._part / 2, now + _RELAX_S
        return True

    def relax(self, now: float) -> bool:
        """Take one `shrink` back when it is time; whether it was."""
        if self._part == 1.0 or now < self._relaxes_at:
            return False
        self._part, self._relaxes_at = self._part * 2, now + _RELAX_S
        return True

    def limits(self) -> ShareLimits:
        limits = self._divide()
        return replace(limits, kv=int(limits.kv * self._part), prefixes=int(limits.prefixes * self._part))

    def _divide(self) -> ShareLimits:
        spec, order = self._spec, self.order
        # Of a group, each rank has its part of what the operator gives the model, and of the memory of its host.
        ranks, beside = spec.group.size if spec.group else 1, spec.rank.beside if spec.rank else 1
        own_kv, own_prefixes = spec.kv_bytes // ranks, spec.cache_bytes // ranks
        if order.share_bytes:
            order = structs.replace(order, share_bytes=order.share_bytes // beside)
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
        # Half of what is free now, with the weights loaded, and an eighth of all there is.
        kv = own_kv if own_kv >= 0 else machine.available // (2 * beside)
        prefixes = own_prefixes if own_prefixes >= 0 else machine.total // (8 * beside)
        return ShareLimits(kv, prefixes, self._most_buffers or usual_buffers())

    def enforce(self, limits: ShareLimits) -> None:
        """Give MLX its limits, and the system the unused buffers.

        To be called when what is above them has been let go of.
        """
        device = self._device
        device.clear_cache()
        device.set_cache_limit(limits.buffers)
        if limits.total:
            device.set_memory_limit(limits.total)
            self._wanted = min(self._weights + limits.kv + limits.prefixes + limits.buffers, device.wirable())
            self._wire(is_new=True)

    def check(self) -> None:
        """Lower the wired limit when that had to wait. Cheap; of use with Metal only."""
        if self._wired != self._wanted:
            self._wire()

    def _wire(self, *, is_new: bool = False) -> None:
        device, wanted = self._device, self._wanted
        if not wanted:
            return
        if wanted < self._wired and device.active() > wanted:
            device.synchronize()  # what was let go of is free when the step has ended that used it last
            if device.active() > wanted:
                wanted = self._wired
        if is_new or wanted != self._wired:
            device.synchronize()
            device.set_wired_limit(wanted)
            self._wired = wanted


def prepare_load() -> None:
    """Before weights are read: what one tensor leaves behind is of little use to the next."""
    mx.set_cache_limit(_LOAD_CACHE_BYTES)


def give_back() -> None:
    """Return unused memory to the system: MLX's free buffers and the C library's free heap."""
    mx.clear_cache()
    give_back_heap()


def give_back_heap() -> None:
    """Return the C library's free heap to the system. Callable from any thread."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # a C library that is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def measure() -> Memory:
    return Memory(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory(), footprint())


def allowed(spec: WorkerSpec) -> int:
    """Bytes that this process may take: as its specification says, or all that the machine has."""
    return spec.memory_bytes or psutil.virtual_memory().total


def has_gpu() -> bool:
    """Whether MLX computes on Metal or CUDA."""
    return mx.default_device() != mx.Device(mx.cpu)


def footprint() -> int:
    """Private bytes of this process: physical footprint on macOS, resident minus shared on Linux."""
    return _darwin_footprint() if sys.platform == "darwin" else _linux_footprint()


def usual_buffers() -> int:
    """Bytes of free buffers that MLX may keep where nothing else was measured."""
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
