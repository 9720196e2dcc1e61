"""Encoder of media: decodes what rows need in a pool, and gives the tower one medium at a time."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy.typing as npt

from worker.errors import RequestInvalid
from worker.vision.features import FeatureCache
from worker.vision.graft import Features
from worker.vision.media import Medium
from worker.vision.tower import Tower

log = logging.getLogger("mlxd.worker")

# Decoding releases the lock of Python for the most part; more threads would take cores from the step loop.
DECODERS: Final = 2
# Media that are decoded ahead of the tower, which takes one a tick: a decoded image is large.
_MOST_DECODED: Final = 4

Pixels = Mapping[str, npt.NDArray[Any]]


@dataclass(slots=True, eq=False)
class _Job:
    """One medium that rows wait for, on its way to features.

    Each row has a medium of its own, which knows what its client calls it; the first one's is made.
    """

    media: dict[int, Medium] = field(default_factory=dict[int, Medium])
    pixels: Future[Pixels] | None = None

    @property
    def medium(self) -> Medium:
        return next(iter(self.media.values()))


class Encoder:
    """Owned by the engine thread, which calls `step` once a tick. Other threads call `wake`."""

    def __init__(self, tower: Tower, features: FeatureCache, wake: Callable[[], None]) -> None:
        self._tower = tower
        self.features = features
        self._wake = wake
        self._jobs: dict[bytes, _Job] = {}
        # Keys that a row has asked for, and what became of them.
        self._wanted: dict[int, set[bytes]] = {}
        # The last medium that a row was found to wait for.
        self._missing: dict[int, bytes] = {}
        self._pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="pixels")

    @property
    def has_pixels(self) -> bool:
        """Whether the tower has something to do."""
        return any(job.pixels is not None and job.pixels.done() for job in self._jobs.values())

    def is_ready(self, rid: int, media: Sequence[Medium]) -> bool:
        """Whether the features of all these media are held for a row; those that are missing are made from now on."""
        wanted = self._wanted.get(rid)
        if wanted is None:
            if self.features.is_full and self._wanted:
                return False  # until rows before it have been prefilled
            wanted = self._wanted[rid] = set()
        last = self._missing.pop(rid, b"")
        job = self._jobs.get(last)
        if job is not None and rid in job.media and any(medium.key == last for medium in media):
            self._missing[rid] = last
            return False  # the answer for most: each row that waits asks at each tick
        jobs, missing = len(self._jobs), b""
        for medium in media:
            if not self.features.holds(rid, medium.key) and not self._want(rid, medium, wanted):
                missing = medium.key
        if missing:
            self._missing[rid] = missing
        if len(self._jobs) > jobs:
            self._submit()
        return not missing

    def _want(self, rid: int, medium: Medium, wanted: set[bytes]) -> bool:
        is_new = medium.key not in wanted
        wanted.add(medium.key)
        if self.features.hold(rid, medium.key) is not None:
            self.features.counts.hits += is_new
            return True
        job = self._jobs.get(medium.key)
        if job is None:
            job = self._jobs[medium.key] = _Job()
        job.media.setdefault(rid, medium)
        self.features.counts.misses += is_new
        return False

    def step(self) -> list[tuple[int, Exception]]:
        """Encode the first medium that has been decoded, if there is one; the rows that failed by it."""
        for key, job in self._jobs.items():
            if job.pixels is not None and job.pixels.done():
                del self._jobs[key]
                try:
                    features = self._encode(job.medium, job.pixels.result())
                except RequestInvalid as error:
                    self.features.counts.failed += 1
                    return [self._refuse(key, job, error)]
                except Exception as error:  # the boundary of the rows that have this medium
                    self.features.counts.failed += 1
                    return [(rid, error) for rid in job.media]
                self.features.put(key, features, set(job.media))
                break
        self._submit()
        return []

    def _refuse(self, key: bytes, job: _Job, error: RequestInvalid) -> tuple[int, Exception]:
        """End the row whose medium was decoded; the others are told by their own."""
        rid, *others = job.media
        if others:
            self._jobs[key] = _Job({other: job.media[other] for other in others})
            self._submit()
        return rid, error

    def get(self, rid: int, medium: Medium) -> Features:
        """Features of a medium for a row that runs now, made at once where they are missing. Raises as that raises."""
        features = self.features.hold(rid, medium.key)
        if features is None:
            self.features.counts.misses += 1
            self.features.counts.decoded += 1
            features = self._encode(medium, medium.load())
            # Rows that wait for it have it too: encoded a second time, it would be put where it is.
            job = self._jobs.pop(medium.key, None)
            if job is not None and job.pixels is not None:
                job.pixels.cancel()
            self.features.put(medium.key, features, {rid, *(job.media if job is not None else ())})
        self._wanted.setdefault(rid, set()).add(medium.key)
        return features

    def release(self, rid: int, keys: Iterable[bytes]) -> None:
        """The prefill of a row has passed these media."""
        for key in keys:
            self.features.release(rid, key)

    def keep(self, rid: int, keys: Iterable[bytes]) -> None:
        """A row needs these media alone: of the others there is KV by now."""
        wanted = self._wanted.get(rid, set[bytes]())
        needless = wanted.difference(keys)
        wanted -= needless
        for key in needless:
            self._drop(rid, key)

    def forget(self, rid: int) -> None:
        """A row needs nothing any more, or has gone."""
        self._missing.pop(rid, None)
        for key in self._wanted.pop(rid, ()):
            self._drop(rid, key)

    def _drop(self, rid: int, key: bytes) -> None:
        self.features.release(rid, key)
        job = self._jobs.get(key)
        if job is not None:
            job.media.pop(rid, None)
            if not job.media:
                del self._jobs[key]
                if job.pixels is not None:
                    job.pixels.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self) -> None:
        begun = sum(job.pixels is not None for job in self._jobs.values())
        for job in self._jobs.values():
            if begun >= _MOST_DECODED:
                return
            if job.pixels is None:
                job.pixels = self._pool.submit(job.medium.load)
                job.pixels.add_done_callback(self._wake_up)
                self.features.counts.decoded += 1
                begun += 1

    def _wake_up(self, _pixels: "Future[Pixels]") -> None:
        self._wake()

    def _encode(self, medium: Medium, pixels: Pixels) -> Features:
        begun = time.perf_counter()
        features = self._tower.encode(medium.kind, medium.tokens, pixels)
        self.features.counts.encoded += 1
        self.features.counts.seconds += time.perf_counter() - begun
        return features
