"""Room for the samples of clips: of those that are being decoded, and of jobs until they end."""

import threading
from collections import Counter
from typing import Final

# An hour of a clip at 16,000 samples a second is 230 MB.
_BYTES: Final = 512 << 20


class SampleRoom:
    """Bytes of samples by tenant. For all threads. What is larger than all of the room gets in alone."""

    def __init__(self, most_bytes: int = _BYTES) -> None:
        self._most = most_bytes
        self._held: Counter[str] = Counter()
        # Also the lock of those who wait for room.
        self.changed = threading.Condition()

    def fits(self, size_bytes: int, own_bytes: int = 0) -> bool:
        """Whether there is room for so much, of which `own_bytes` are held already."""
        with self.changed:
            others = self._held.total() - own_bytes
            return not others or others + size_bytes <= self._most

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
