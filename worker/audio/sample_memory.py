"""Memory for the samples of clips, while they are decoded and until their jobs end."""

import math
import threading
from collections import Counter
from typing import Final

from protocol.transcript import MAX_CLIP_BYTES, MIN_CLIP_BYTES

# A forward pass is assumed to need at least this much memory.
_MIN_PASS_BYTES: Final = 64 << 20
# A forward pass is assumed to need the size of the weights divided by this number. See PASS_BYTES in
# gateway/workers/memory/estimate.py.
_PASS_WEIGHTS_DIVISOR: Final = 8


def bytes_for_clips(share: int, weights: int, host: int, buffers: int) -> int:
    """Return the bytes of a memory share that remain for samples; `host` is the memory of Python and libraries."""
    left = share - weights - host - buffers - max(_MIN_PASS_BYTES, weights // _PASS_WEIGHTS_DIVISOR)
    return max(MIN_CLIP_BYTES, left)


class SampleMemory:
    """Bytes of samples by tenant, safe for all threads.

    All clips together have `most_bytes`; a larger clip may be admitted alone, up to `alone_bytes`.
    """

    def __init__(self, most_bytes: int = MAX_CLIP_BYTES, alone_bytes: float = math.inf) -> None:
        self._most = most_bytes
        self.alone_bytes = alone_bytes
        self._held: Counter[str] = Counter()
        # Condition whose lock guards the counts, and on which threads that need memory wait.
        self.changed = threading.Condition()

    def resize(self, most_bytes: int, alone_bytes: float) -> None:
        """Change the limits; clips may already hold more than the new limits."""
        with self.changed:
            self._most, self.alone_bytes = most_bytes, alone_bytes
            self.changed.notify_all()

    def fits(self, size_bytes: int, own_bytes: int = 0) -> bool:
        """Return whether `size_bytes` are within the limits; `own_bytes` of them are already held."""
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
        """Return the bytes that one tenant holds."""
        return self._held[tenant]

    @property
    def total(self) -> int:
        """Return the bytes that all tenants hold."""
        with self.changed:
            return self._held.total()
