"""Counter of the media bytes of all requests. Bytes count from when they are read until their request ends."""

from collections import Counter
from collections.abc import Callable
from typing import Final

from gateway.errors import Unavailable
from gateway.telemetry.metrics import MediaNumbers
from protocol.codec import MAX_FRAME_BYTES

IN_FLIGHT_BYTES_MAX: Final = 512 * 1024 * 1024
RETRY_AFTER_S: Final = 2.0


def share_bytes(limit_bytes: int, has_others: bool) -> int:
    """Return the limit for one key. If there are other keys, it is half of the bytes, but at least as many as one
    request may send.
    """
    return max(limit_bytes // 2, min(limit_bytes, MAX_FRAME_BYTES)) if has_others else limit_bytes


class InFlightBytes:
    """Counter of bytes with a limit for all keys together and one for each key. Used on the event loop only."""

    def __init__(self, has_others: Callable[[], bool] = bool, limit_bytes: int = IN_FLIGHT_BYTES_MAX) -> None:
        """`limit_bytes` is for all owners together; `has_others` returns whether there are several owners."""
        self.limit_bytes = limit_bytes
        self._has_others = has_others
        self._held: Counter[str] = Counter()
        self.numbers = MediaNumbers()

    def lease(self) -> "MediaLease":
        return MediaLease(self)

    def take(self, owner: str, size_bytes: int) -> None:
        """Count more bytes of an owner. Raises `Unavailable` if a limit would be exceeded."""
        limit = self.limit_bytes
        if self.numbers.used_bytes + size_bytes > limit:
            self._refuse("The media of the requests that run fill the memory set aside for them. Try again later.")
        if self._held[owner] + size_bytes > share_bytes(limit, self._has_others()):
            self._refuse("The media of this key's requests fill its share of the memory for media. Try again later.")
        self.numbers.used_bytes += size_bytes
        self._held[owner] += size_bytes

    def give_back(self, owner: str, size_bytes: int) -> None:
        self.numbers.used_bytes -= size_bytes
        self._held[owner] -= size_bytes
        if not self._held[owner]:
            del self._held[owner]

    def _refuse(self, message: str) -> None:
        self.numbers.refused += 1
        raise Unavailable(message, RETRY_AFTER_S, "media_memory_full")


class MediaLease:
    """Counts the media bytes of one request. The request's record owns the lease and closes it when the request has
    ended.
    """

    __slots__ = ("_counted", "owner", "size_bytes")

    def __init__(self, counted: InFlightBytes) -> None:
        self._counted = counted
        # Key to whose share the bytes count. It is set before the first byte.
        self.owner = ""
        self.size_bytes = 0

    def grow(self, more_bytes: int) -> None:
        """Count more bytes. Raises `Unavailable`."""
        self._counted.take(self.owner, more_bytes)
        self.size_bytes += more_bytes

    def close(self) -> None:
        self._counted.give_back(self.owner, self.size_bytes)
        self.size_bytes = 0
