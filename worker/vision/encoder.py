"""Encoder of media: a pool decodes the media that rows need, and the tower encodes one medium at a time.

Cache of features: the media that a tower has encoded last, by their keys and within a budget of bytes.
"""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final

import numpy.typing as npt

from protocol.stats import Stats
from worker.errors import RequestInvalid, is_allocation_failure
from worker.vision.media import Medium
from worker.vision.multimodal_merge import MediaFeatures
from worker.vision.tower import Tower

# Rows may hold at least this many bytes of features before another row must wait, even if the budget is smaller.
HELD_MIN_BYTES: Final = 64 << 20


class FeatureCache:
    """LRU cache of features within a budget, owned by the engine thread. Features held by rows are never evicted."""

    def __init__(self, budget: int, held_min: int = HELD_MIN_BYTES) -> None:
        self._budget = budget
        self._held_min = held_min
        self._entries: OrderedDict[bytes, MediaFeatures] = OrderedDict()
        self._holders: defaultdict[bytes, set[int]] = defaultdict(set)
        self.nbytes = 0
        self.held_bytes = 0
        self.counts = Stats()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    @property
    def budget(self) -> int:
        return self._budget

    @property
    def keys(self) -> KeysView[bytes]:
        return self._entries.keys()

    @property
    def limit(self) -> int:
        """Return the number of bytes that rows may hold; the encoder lets one row exceed it."""
        return max(self._budget, self._held_min)

    def fits(self, size_bytes: int) -> bool:
        """Return whether rows may hold this many more bytes."""
        return self.held_bytes + size_bytes <= self.limit

    def size(self, key: bytes) -> int | None:
        """Return the bytes of a medium's features; None if they are not cached."""
        features = self._entries.get(key)
        return features.nbytes if features is not None else None

    def is_held(self, key: bytes) -> bool:
        return key in self._holders

    def held_by_others(self, rids: Collection[int]) -> int:
        """Return the bytes that rows other than `rids` hold."""
        return sum(
            self._entries[key].nbytes
            for key, holders in self._holders.items()
            if any(rid not in rids for rid in holders)
        )

    def holds(self, rid: int, key: bytes) -> bool:
        return rid in self._holders.get(key, ())

    def hold(self, rid: int, key: bytes) -> MediaFeatures | None:
        """Return a medium's features and hold them for this row until `release`; None if they are not cached."""
        features = self._entries.get(key)
        if features is None:
            return None
        self._entries.move_to_end(key)
        if key not in self._holders:
            self.held_bytes += features.nbytes
        self._holders[key].add(rid)
        return features

    def put(self, key: bytes, features: MediaFeatures, rids: set[int]) -> None:
        """Cache new features, and hold them for these rows."""
        assert key not in self._entries
        self._entries[key] = features
        self.nbytes += features.nbytes
        for rid in rids:
            self.hold(rid, key)
        self._evict()

    def release(self, rid: int, key: bytes) -> None:
        holders = self._holders.get(key)
        if holders is None or rid not in holders:
            return
        holders.discard(rid)
        if not holders:
            del self._holders[key]
            self.held_bytes -= self._entries[key].nbytes
            self._evict()

    def resize(self, budget: int) -> None:
        self._budget = budget
        self._evict()

    def clear(self) -> None:
        """Evict all features that no row holds."""
        budget, self._budget = self._budget, 0
        self._evict()
        self._budget = budget

    def check(self) -> None:
        """Raise AssertionError if the byte counts are inconsistent; slow."""
        assert self.nbytes == sum(features.nbytes for features in self._entries.values())
        assert self.held_bytes == sum(self._entries[key].nbytes for key in self._holders)
        assert all(self._holders.values())
        assert self.nbytes <= max(self._budget, self.held_bytes)

    def _evict(self) -> None:
        for key in [key for key in self._entries if key not in self._holders]:
            if self.nbytes <= self._budget:
                return
            self.nbytes -= self._entries.pop(key).nbytes
            self.counts.feature_evictions += 1


# Number of decoder threads. Decoding mostly releases the GIL; more threads would take cores from the step loop.
DECODERS: Final = 2
# Maximum number of media that are decoded and not encoded yet. The tower encodes one medium per tick, and decoded
# images are large. The first row may exceed this number by one.
_MAX_DECODED_AHEAD: Final = 4

Pixels = Mapping[str, npt.NDArray[Any]]


@dataclass(slots=True, eq=False)
class _Job:
    """Encoding of one medium that rows wait for.

    Each row has its own `Medium`, with the path that its client gave it; the first row's `Medium` is encoded.
    """

    media: dict[int, Medium] = field(default_factory=dict[int, Medium])
    pixels: Future[Pixels] | None = None
    # Whether an allocation for this medium has already failed once.
    is_retried: bool = False

    @property
    def medium(self) -> Medium:
        return next(iter(self.media.values()))

    @property
    def has_pixels(self) -> bool:
        return self.pixels is not None and self.pixels.done()


class MediaEncoder:
    """Encoder that hands rows the features of their media. Owned by the engine thread, which calls `step` once a tick;
    other threads call `wake`.

    A waiting row holds features of some of its media while the others are encoded. Together with rows in prefill,
    waiting rows hold at most the limit of the feature cache plus the media of one row: a medium is encoded, or held, if
    it fits the limit, or if the first waiting row needs it while others hold no more than the limit.

    No row waits forever:
    - A row that has all of its media requests no more; in prefill it releases them one by one.
    - The first row always makes progress: rows behind it give up what exceeds the limit, the newest first, and rows in
      prefill release theirs as they run. One of its media is decoded regardless of how many others are.
    - So the first row enters prefill, and another row becomes the first.

    Held bytes only fall between two encodes, and after an encode the other rows hold at most the limit. This bound
    remains when another row becomes the first from one tick to the next.
    """

    def __init__(self, tower: Tower, features: FeatureCache, wake: Callable[[], None]) -> None:
        self._tower = tower
        self.features = features
        self._wake = wake
        self._jobs: dict[bytes, _Job] = {}
        # Jobs whose decoding has begun or finished.
        self._begun: dict[bytes, _Job] = {}
        # Media that waiting rows have requested. The rows are in order of arrival.
        self._waiting: dict[int, dict[bytes, Medium]] = {}
        # Keys of the media that rows in prefill have requested.
        self._running: dict[int, set[bytes]] = {}
        # Key of the last medium that was missing, by row.
        self._missing: dict[int, bytes] = {}
        # The waiting row that runs next.
        self._first: int | None = None
        # Bytes of features per token; 0 until the first encode.
        self._token_bytes = 0
        # Whether the newest step handed features to a row.
        self._has_given = False
        self._pool = ThreadPoolExecutor(DECODERS, thread_name_prefix="pixels")

    @property
    def is_busy(self) -> bool:
        """Whether `step` has work to do, or has handed features to a row."""
        return self._has_given or any(job.has_pixels and self._may_hold(key, job) for key, job in self._begun.items())

    def is_ready(self, rid: int, media: Sequence[Medium], *, is_first: bool = False) -> bool:
        """Return whether a row holds the features of all these media; the missing ones are requested.

        `is_first` means that no waiting row comes before this row.
        """
        if is_first:
            self._first = rid
        requested = self._waiting.setdefault(rid, {})
        last = self._missing.pop(rid, b"")
        job = self._jobs.get(last)
        if job is not None and rid in job.media and any(medium.key == last for medium in media):
            self._missing[rid] = last
            return False  # this common case must be fast, because it runs for each waiting row at every tick
        missing = b""
        for medium in media:
            if not self.features.holds(rid, medium.key) and not self._want(rid, medium, requested):
                missing = medium.key
        if missing:
            self._missing[rid] = missing
            self._submit()
        return not missing

    def _want(self, rid: int, medium: Medium, requested: dict[bytes, Medium]) -> bool:
        """Hold a medium's features for a row if they are encoded and within the limit; otherwise request them."""
        key, size = medium.key, self.features.size(medium.key)
        if key not in requested:
            requested[key] = medium
            self.features.counts.feature_hits += size is not None
            self.features.counts.feature_misses += size is None
        if size is not None and (self.features.is_held(key) or self.features.fits(size)):
            self.features.hold(rid, key)
            return True
        self._jobs.setdefault(key, _Job()).media.setdefault(rid, medium)
        return False

    def step(self) -> list[tuple[int, Exception]]:
        """Encode the first decoded medium, if any, and return the rows that failed with it.

        A failed allocation raises the first time, and the next step tries the medium again.
        """
        self._has_given = False
        for key in self._jobs.keys() & self.features.keys:
            self._give(key)
        failed = self._encode_next()
        self._submit()
        return failed

    def _give(self, key: bytes) -> None:
        """Hold encoded features for the rows that wait for them, within the limit."""
        job = self._jobs[key]
        if not self._may_hold(key, job):
            return
        for rid in self._holders(key, job):
            self.features.hold(rid, key)
            del job.media[rid]
            self._has_given = True
        if not job.media:
            self._end(key)

    def _encode_next(self) -> list[tuple[int, Exception]]:
        key = next((key for key, job in self._begun.items() if job.has_pixels and self._may_hold(key, job)), None)
        if key is None:
            return []
        job = self._jobs[key]
        assert job.pixels is not None
        try:
            features = self._encode(job.medium, job.pixels.result())
        except RequestInvalid as error:
            return [self._refuse(key, error)]
        except Exception as error:  # the error fails only the rows that have this medium
            if is_allocation_failure(error) and not job.is_retried:
                job.is_retried = True
                if job.pixels.exception() is not None:
                    del self._begun[key]
                    job.pixels = None
                raise
            self.features.counts.media_failed += 1
            self._end(key)
            return [(rid, error) for rid in job.media]
        self._token_bytes = features.nbytes // job.medium.tokens
        holders = self._holders(key, job)
        self.features.put(key, features, holders)
        for rid in holders:
            del job.media[rid]
        self._end(key)
        if job.media:  # the remaining rows do not hold the features yet, so they need another encode
            self._jobs[key] = _Job(job.media)
        self._has_given = True
        return []

    def _refuse(self, key: bytes, error: RequestInvalid) -> tuple[int, Exception]:
        """Fail the row whose medium was decoded. Other rows decode the medium again, so that errors name their own
        paths.
        """
        self.features.counts.media_failed += 1
        job = self._end(key)
        rid, *others = job.media
        if others:
            self._jobs[key] = _Job({other: job.media[other] for other in others})
        return rid, error

    def held(self, rid: int, medium: Medium) -> MediaFeatures:
        """Return the features of a medium that a row holds."""
        features = self.features.hold(rid, medium.key)
        assert features is not None, "a row runs once it holds what it needs"
        return features

    def release(self, rid: int, keys: Iterable[bytes]) -> None:
        """Release media that the prefill of a row has passed."""
        for key in keys:
            self.features.release(rid, key)

    def keep(self, rid: int, keys: Iterable[bytes]) -> None:
        """Keep only these media for a row that begins to run; the KV cache covers the others."""
        needed = set(keys)
        needless = self._waiting.pop(rid, {}).keys() - needed
        self._running[rid] = needed
        self._pass_first(rid)
        for key in needless:
            self._drop(rid, key)

    def forget(self, rid: int) -> None:
        """Release all media of a row that has ended or needs none."""
        self._pass_first(rid)
        for key in (*self._waiting.pop(rid, {}), *self._running.pop(rid, ())):
            self._drop(rid, key)

    def _pass_first(self, rid: int) -> None:
        self._missing.pop(rid, None)
        if self._first == rid:
            self._first = None

    def _drop(self, rid: int, key: bytes) -> None:
        self.features.release(rid, key)
        job = self._jobs.get(key)
        if job is not None:
            job.media.pop(rid, None)
            if not job.media:
                self._end(key)
                if job.pixels is not None:
                    job.pixels.cancel()

    def _end(self, key: bytes) -> _Job:
        self._begun.pop(key, None)
        return self._jobs.pop(key)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- bytes that rows hold ----------------------------------------------------------------------------------------

    def _may_hold(self, key: bytes, job: _Job) -> bool:
        """Return whether a waiting row may hold the features of a medium now."""
        if self._fits(key, job):
            return True
        return self._first in job.media and self.features.held_by_others(self._waiting) <= self.features.limit

    def _fits(self, key: bytes, job: _Job) -> bool:
        size = self.features.size(key)
        if size is None:
            return self.features.fits(job.medium.tokens * self._token_bytes)
        return self.features.is_held(key) or self.features.fits(size)

    def _holders(self, key: bytes, job: _Job) -> set[int]:
        """Return the rows that may hold the features: all that wait for them, or only the first, after others release
        theirs.
        """
        if self._fits(key, job):
            return set(job.media)
        assert self._first is not None
        self._take_back(self._first)
        return {self._first}

    def _take_back(self, first: int) -> None:
        """Release features of the rows behind the first, the newest first, down to the limit."""
        for rid in reversed(self._waiting):
            if self.features.held_by_others({first}) <= self.features.limit:
                return
            if rid != first:
                self.release(rid, self._waiting[rid])

    # -- decoding ----------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        """Decode media ahead of the tower if they will fit, and always one medium of the first row."""
        missing = self._missing.get(self._first) if self._first is not None else None
        if missing is not None and not any(self._first in job.media for job in self._begun.values()):
            self._decode(missing)
        for key, job in self._jobs.items():
            if len(self._begun) >= _MAX_DECODED_AHEAD or not self._fits(key, job):
                return
            self._decode(key)

    def _decode(self, key: bytes) -> None:
        job = self._jobs.get(key)
        if job is not None and job.pixels is None and key not in self.features:
            self._begun[key] = job
            job.pixels = self._pool.submit(job.medium.load)
            job.pixels.add_done_callback(self._wake_up)
            self.features.counts.media_decoded += 1

    def _wake_up(self, _pixels: "Future[Pixels]") -> None:
        self._wake()

    def _encode(self, medium: Medium, pixels: Pixels) -> MediaFeatures:
        begun = time.perf_counter()
        features = self._tower.encode(medium.kind, medium.tokens, pixels)
        self.features.counts.media_encoded += 1
        self.features.counts.encode_s += time.perf_counter() - begun
        return features
