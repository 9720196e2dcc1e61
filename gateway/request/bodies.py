"""Request bodies: the memory that all of them share, and the thread in which large ones are read and lowered."""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psutil

from gateway.config.settings import ServerConfig
from gateway.errors import BodyTooLarge, Unavailable

T = TypeVar("T")

# What is made of a smaller body takes less time than it is worth to hand it to a thread.
LARGE_BYTES: Final = 64 * 1024
# How long a request waits for others to end when there is no room for its body, and then is told to come again.
ROOM_WAIT_S: Final = 5.0
RETRY_AFTER_S: Final = 2.0
# Of the machine's memory, where the configuration leaves it to us.
_AUTO_PART: Final = 64
_AUTO_MIN_BYTES: Final = 256 * 1024 * 1024


def memory_bytes(server: ServerConfig) -> int:
    """What bodies may take together."""
    if server.body_memory_bytes != "auto":
        return server.body_memory_bytes
    return max(psutil.virtual_memory().total // _AUTO_PART, _AUTO_MIN_BYTES, server.max_body_bytes)


@dataclass(slots=True)
class BodyNumbers:
    """What is counted of bodies. Written on the event loop."""

    used_bytes: int = 0
    # Requests that found no room in time, and actions that were carried out in the thread.
    refused: int = 0
    offloaded: int = 0


class Bodies:
    """The room for bodies. Everything but `work`'s action happens on the event loop.

    A body counts from its first byte, or from the length it announces, until its request has ended: what was made of
    it lives as long. Who finds no room waits in order of arrival.
    """

    def __init__(self, limit_bytes: Callable[[], int]) -> None:
        self._limit_bytes = limit_bytes
        self._thread = ThreadPoolExecutor(1, "bodies")
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.numbers = BodyNumbers()

    def lease(self) -> "BodyLease":
        return BodyLease(self)

    async def work(self, size_bytes: int, action: Callable[..., T], *arguments: Any) -> T:
        """What `action` returns; carried out in the thread when it works on a large body, one after the other.

        The interpreter is handed over between two calls into native code: none of them may take long.
        """
        if size_bytes <= LARGE_BYTES:
            return action(*arguments)
        self.numbers.offloaded += 1
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, *arguments)

    def close(self) -> None:
        """Finish what was begun."""
        self._thread.shutdown()

    def take(self, size_bytes: int) -> bool:
        """Whether there is room, which is taken then."""
        has_room = not self._waiting and self.numbers.used_bytes + size_bytes <= self._limit_bytes()
        if has_room:
            self.numbers.used_bytes += size_bytes
        return has_room

    async def wait(self, size_bytes: int) -> None:
        """Take room once there is some. Raises `Unavailable` when there is none in time, or `BodyTooLarge`."""
        limit = self._limit_bytes()
        if size_bytes > limit:
            raise BodyTooLarge(limit)
        room: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (size_bytes, room)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(ROOM_WAIT_S):
                await room
        except TimeoutError:
            if not room.cancelled():
                return  # it was given in the same turn of the loop
            self.numbers.refused += 1
            message = "The bodies of the requests that run fill the memory set aside for them. Try again later."
            raise Unavailable(message, RETRY_AFTER_S, "body_memory_full") from None
        except BaseException:
            if room.done() and not room.cancelled():
                self.give_back(size_bytes)
            raise
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._admit()

    def give_back(self, size_bytes: int) -> None:
        self.numbers.used_bytes -= size_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.numbers.used_bytes + self._waiting[0][0] <= self._limit_bytes():
            size, room = self._waiting.popleft()
            if not room.done():
                self.numbers.used_bytes += size
                room.set_result(None)


class BodyLease:
    """The room of one request. Owned by its record; closed when the request has ended."""

    __slots__ = ("_bodies", "size_bytes")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self.size_bytes = 0

    async def reach(self, size_bytes: int) -> None:
        """Have room for so many bytes in all. Raises `Unavailable` or `BodyTooLarge`."""
        more = size_bytes - self.size_bytes
        if more <= 0:
            return
        if not self._bodies.take(more):
            await self._bodies.wait(more)
        self.size_bytes = size_bytes

    def close(self) -> None:
        if self.size_bytes:
            self._bodies.give_back(self.size_bytes)
            self.size_bytes = 0
