"""Parts around a simulated engine: clock, disk, memory and the model, which fail on demand."""
# pyright: reportPrivateUsage=false

import errno
import functools
import random
import tempfile
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from protocol.spec import WorkerSpec
from tests.support.engine import spec
from tests.support.models import build
from worker.engine import loop, output, request_loop
from worker.engine.batch import Batch
from worker.engine.scheduling import kv_budget, memory_limits, pacing
from worker.engine.scheduling.pacing import ChunkPlan, Pacer
from worker.model.loader import LoadedModel
from worker.model.memory import MlxDevice
from worker.prefix_cache import cache_and_eviction
from worker.prefix_cache.disk import CacheDisk, DiskEntry, FolderOwner, ModelFolder, _Write
from worker.prompt.intake import Intake
from worker.start.checked_model import load_checked
from worker.structured import masks

NO_MEMORY = "[metal::malloc] Unable to allocate 5 bytes."
# Tokens to which the KV budget rounds a row here, instead of 256.
KV_STEP = 8
# Minimum number of tokens of a file here, instead of 64, so that short prompts use the disk.
DISK_MIN_TOKENS = 16
# Folder in memory for the disk cache, so that no world waits for the disk; None where there is none.
MEMORY_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None
_CLOCKED = loop, request_loop, output, memory_limits, pacing, cache_and_eviction


@functools.cache
def model_of(architecture: str) -> LoadedModel:
    """A model of one layer, or of two that differ, loaded once for all worlds of a process."""
    folder = Path(_folder().name) / architecture
    # Of the windows of gemma3_text, every second layer has none.
    pattern = {"sliding_window_pattern": 2} if architecture == "gemma3_text" else {}
    layers = 1 if architecture == "qwen3" else 2
    path = build(architecture, folder, markers=(), seed=0, num_hidden_layers=layers, **pattern)
    return load_checked(spec(path), _no_progress)


def _no_progress(_stage: str, _done_bytes: int, _total_bytes: int) -> None:
    pass


@functools.cache
def intake_of(architecture: str) -> Intake:
    return Intake(model_of(architecture))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="simulation-")


@dataclass(slots=True)
class Clock:
    """Virtual monotonic clock of the engine's scheduling; it moves between ticks only."""

    now: float = 1000.0


class BrokenPath(type(Path())):
    """Path of a file on a broken part of the disk: opening it fails, and so does asking whether it exists."""

    def open(self, *_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(self))

    def stat(self, **_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error", str(self))


class BreakableFolder(ModelFolder):
    """Folder of a disk cache whose files may be on a broken part of the disk."""

    broken: str = ""

    def path(self, key: str) -> Path:
        path = super().path(key)
        return BrokenPath(path) if path.name == self.broken else path


class TurnDisk(CacheDisk):
    """Disk cache without threads: `turn` does the queued writes and reads in the code of the threads.

    A thread that raises has ended, as a real one: nothing is read or written from then on.
    """

    is_full = False

    def __init__(
        self, root: Path, model_key: str, cap: int, wake: Callable[[], None], *, claim: FolderOwner | None
    ) -> None:
        super().__init__(root, model_key, cap, wake, claim=claim)
        self.folder = self._folder = BreakableFolder(root, model_key, cap, claim)
        self._ended: set[str] = set()

    def start(self) -> list[DiskEntry]:
        return self._scan()

    def turn(self) -> None:
        if not self._to_write.empty():
            self._to_write.put(None)
            self._run("writer", self._write_all)
        if not self._to_read.empty():
            self._to_read.put(None)
            self._run("reader", self._read_all)
            self._is_reading = "reader" not in self._ended

    def _run(self, thread: str, work: Callable[[], None]) -> None:
        if thread not in self._ended:
            try:
                work()
            except Exception:  # as the root of a thread
                self._ended.add(thread)

    def close(self, timeout_s: float = 0.0) -> None:
        self.turn()

    def _write_one(self, write: _Write) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._write_one(write)


class NoDevice(MlxDevice):
    """Device whose limits no world changes: they are those of the whole test process."""

    def set_cache_limit(self, limit: int) -> None:
        pass

    def set_memory_limit(self, limit: int) -> None:
        pass

    def set_wired_limit(self, limit: int) -> None:
        pass

    def clear_cache(self) -> None:
        pass


class SeededPacer(Pacer):
    """Pacer whose chunks the seed draws instead of measured times."""

    def __init__(self, spec: WorkerSpec, rng: random.Random) -> None:
        super().__init__(spec, None, None, can_fuse=True, has_watchdog=False)
        self._rng = rng

    def chunk(self, prefilling: int, decoding: int, longest: int, context: int) -> ChunkPlan:
        return ChunkPlan(self._rng.choice((1, 7, 32, 200)), is_fused=self._rng.random() < 0.5)

    def observe(self, each: object) -> None:
        pass


@dataclass(slots=True)
class LateMask:
    """Mask that is computed after this many ticks."""

    ticks: int
    future: Future[Any]
    work: Callable[[], Any]

    def compute(self) -> None:
        try:
            self.future.set_result(self.work())
        except Exception as error:  # as an executor
            self.future.set_exception(error)


class InlineThreads:
    """Executor of grammar masks that computes at once, or as many ticks later as `draw` returns."""

    def __init__(self, draw: Callable[[], int]) -> None:
        self._draw = draw
        self._late: list[LateMask] = []

    def submit(self, work: Callable[..., Any], *args: Any) -> Future[Any]:
        mask = LateMask(self._draw(), Future(), partial(work, *args))
        if mask.ticks:
            self._late.append(mask)
        else:
            mask.compute()
        return mask.future

    def turn(self) -> None:
        for mask in self._late:
            mask.ticks -= 1
            if not mask.ticks:
                mask.compute()
        self._late = [mask for mask in self._late if mask.ticks]

    def shutdown(self, *_: Any, **__: Any) -> None:
        self._late.clear()


def _wait_for_nothing(*_: Any, **__: Any) -> None:
    """Take the place of a wait for masks: those that are not ready are late."""


class TurnEngine(loop.Engine):
    """Engine whose batches compute masks in their own thread. `draw_late` returns by how many ticks a mask is late."""

    draw_late: Callable[[], int] = staticmethod(lambda: 0)

    def new_batch(self) -> Batch:
        batch = super().new_batch()
        self.mask_threads = InlineThreads(lambda: self.draw_late())
        batch._masks._threads = self.mask_threads  # pyright: ignore[reportAttributeAccessIssue]
        return batch


@contextmanager
def machine(clock: Clock, reserved_tokens: int) -> Generator[None]:
    """Virtual clock, disk without threads, and a fine-grained KV budget for all engines made inside."""
    time = SimpleNamespace(monotonic=lambda: clock.now)
    with (
        patch("worker.prefix_cache.fingerprint.CacheDisk", TurnDisk),
        patch("worker.model.memory.MlxDevice", NoDevice),
        patch.object(masks, "wait", _wait_for_nothing),
        patch.object(kv_budget, "STEP", KV_STEP),
        patch.object(cache_and_eviction, "MIN_TOKENS", DISK_MIN_TOKENS),
        patch.object(kv_budget, "RESERVED_OUTPUT_TOKENS", reserved_tokens),
    ):
        patches = [patch.object(module, "time", time) for module in _CLOCKED]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()
