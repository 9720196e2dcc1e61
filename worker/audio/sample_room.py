"""Room for the samples of clips: of those that are being decoded, and of jobs until they end."""

import math
import threading
from collections import Counter
from typing import Final

from protocol.transcript import CLIP_BYTES, CLIP_BYTES_LEAST

# What a pass computes, at least and as a part of the weights: see PASS_BYTES in gateway/workers/memory/estimate.py.
_PASS_BYTES: Final = 64 << 20
_PASS_PART: Final = 8


def bytes_for_clips(share: int, weights: int, host: int, buffers: int) -> int:
    """Of a share of memory, what is left for samples; `host` is Python and libraries without samples."""
    left = share - weights - host - buffers - max(_PASS_BYTES, weights // _PASS_PART)
    return max(CLIP_BYTES_LEAST, left)


class SampleRoom:
    """Bytes of samples by tenant. For all threads.

    All clips together have `most_bytes`; one that is larger gets in alone, up to `alone_bytes`.
    """

    def __init__(self, most_bytes: int = CLIP_BYTES, alone_bytes: float = math.inf) -> None:
        self._most = most_bytes
        self.alone_bytes = alone_bytes
        self._held: Counter[str] = Counter()
        # Also the lock of those who wait for room.
        self.changed = threading.Condition()

    def resize(self, most_bytes: int, alone_bytes: float) -> None:
        """From now on; what is held already may be more."""
        with self.changed:
            self._most, self.alone_bytes = most_bytes, alone_bytes
            self.changed.notify_all()

    def fits(self, size_bytes: int, own_bytes: int = 0) -> bool:
        """Whether there is room for so much, of which `own_bytes` are held already."""
        with self.changed:
            others = self._held.total() - own_bytes
            return others + size_bytes <= self._most if others else size_bytes <= self.alone_bytes

    def take(self, tenant: str, size_bytes: int) -> None:
        with self.changed:
            self._held[tenant] += size_bytes

    def give_back(self, tenant: str, size_bytes: int) -> None:
        with self.changed:
            self._held[tenant] -= size_bytes
            if not self._held[tenant]:
                del self._held[tenant]
            self.changed.notify_all()

    def held(self, tenant: str) -> int:
        """Bytes of one tenant."""
        return self._held[tenant]

    @property
    def total(self) -> int:
        """Bytes of all."""
        with self.changed:
            return self._held.total()
