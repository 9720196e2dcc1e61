"""Cache of features: the media that a tower has encoded last, by their keys and within a budget of bytes."""

from collections import OrderedDict, defaultdict
from collections.abc import Collection, KeysView
from typing import Final

from protocol.stats import Stats
from worker.vision.multimodal_merge import MediaFeatures

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
