"""Bytes of the media of all requests together, from when they are read until their requests have ended."""

from collections.abc import Callable
from typing import Final

from gateway.errors import Unavailable

RETRY_AFTER_S: Final = 2.0


class InFlightBytes:
    """The count, and its limit. Owned by the event loop."""

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self.used_bytes = 0
        self.refused = 0

    def lease(self) -> "MediaLease":
        return MediaLease(self)

    def take(self, size_bytes: int) -> None:
        """Raises `Unavailable` when there is no room."""
        if self.used_bytes + size_bytes > self._limit_bytes():
            self.refused += 1
            message = "The media of the requests that run fill the memory set aside for them. Try again later."
            raise Unavailable(message, RETRY_AFTER_S, "media_memory_full")
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes


class MediaLease:
    """The bytes of one request. Owned by its record; closed when the request has ended."""

    __slots__ = ("_counted", "size_bytes")

    def __init__(self, counted: InFlightBytes) -> None:
        self._counted = counted
        self.size_bytes = 0

    def grow(self, more_bytes: int) -> None:
        """Raises `Unavailable`."""
        self._counted.take(more_bytes)
        self.size_bytes += more_bytes

    def close(self) -> None:
        self._counted.give_back(self.size_bytes)
        self.size_bytes = 0
