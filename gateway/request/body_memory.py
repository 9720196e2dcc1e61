"""Request bodies: the memory that they share, and the thread in which large ones are decoded and lowered."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import psutil

from gateway.config.settings import ServerConfig
from gateway.errors import FULL_RETRY_AFTER_S, BodyTooLarge, Unavailable
from gateway.telemetry.metrics import BodyNumbers

T = TypeVar("T")

# Work on a smaller body takes less time than its transfer to a thread.
LARGE_BYTES: Final = 64 * 1024
# A request waits at most this long for memory for its body. After that it is refused.
MEMORY_WAIT_S: Final = 5.0
# The bodies of all requests together may have this part of the machine's memory.
_MEMORY_DIVISOR: Final = 64
_MEMORY_MIN_BYTES: Final = 256 * 1024 * 1024


def part_of_machine_bytes() -> int:
    """Return the part of the machine's memory for request bodies."""
    return max(psutil.virtual_memory().total // _MEMORY_DIVISOR, _MEMORY_MIN_BYTES)


def memory_bytes(server: ServerConfig) -> int:
    """Return the memory limit of all request bodies together. One body of the maximum size always has room."""
    return max(part_of_machine_bytes(), server.max_body_bytes)


def quota_bytes(server: ServerConfig, has_others: bool) -> int:
    """Return the memory limit of one key's bodies.

    If there are other keys, it is half of the limit of all bodies, but at least two bodies of the maximum size.
    """
    limit = memory_bytes(server)
    return max(limit // 2, min(limit, 2 * server.max_body_bytes)) if has_others else limit


@dataclass(slots=True, eq=False)
class _Wait:
    """A request that waits for memory, and how much it waits for."""

    owner: str
    size_bytes: int
    room: asyncio.Future[None]


class Bodies:
    """Memory for request bodies. Only the action passed to `work` runs outside of the event loop.

    The received part of a body is counted until the body's request has ended, because the decoded body lives as long.
    Requests that must wait for memory get it in order of arrival, small bodies before large ones. A request whose key
    has used up its quota does not delay the requests of other keys.
    """

    def __init__(self, limit_bytes: Callable[[], int], quota_bytes: Callable[[], int] | None = None) -> None:
        """`limit_bytes` returns the limit of all owners together; `quota_bytes` returns that of one owner."""
        self._limit_bytes = limit_bytes
        self._quota_bytes = quota_bytes or limit_bytes
        self._thread = ThreadPoolExecutor(1, "bodies")
        self._small: deque[_Wait] = deque()
        self._large: deque[_Wait] = deque()
        self._held: Counter[str] = Counter()
        self.numbers = BodyNumbers()

    def lease(self) -> "BodyLease":
        return BodyLease(self)

    async def work(self, size_bytes: int, action: Callable[..., T], *arguments: Any) -> T:
        """Run `action` and return its result. Actions on large bodies run in a thread, one after the other.

        A call into native code holds the interpreter's lock, so each such call must be short.
        """
        if size_bytes <= LARGE_BYTES:
            return action(*arguments)
        self.numbers.offloaded += 1
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, *arguments)

    def close(self) -> None:
        """Finish all actions, and end the thread."""
        self._thread.shutdown()

    def take(self, owner: str, size_bytes: int, *, is_small: bool) -> bool:
        """Reserve memory without waiting. Returns False if there is not enough."""
        must_wait = self._small or (self._large and not is_small)
        has_room = not must_wait and self._fits(size_bytes) and self._may_hold(owner, size_bytes)
        if has_room:
            self._take(owner, size_bytes)
        return has_room

    async def wait(self, owner: str, size_bytes: int, *, is_small: bool) -> None:
        """Wait for memory and reserve it. Raises `Unavailable` if not enough becomes free in time."""
        entry = _Wait(owner, size_bytes, asyncio.get_running_loop().create_future())
        waiting = self._small if is_small else self._large
        waiting.append(entry)
        self._admit()
        try:
            async with asyncio.timeout(MEMORY_WAIT_S):
                await entry.room
        except TimeoutError:
            if not entry.room.cancelled():
                return  # The memory was granted in the same turn of the loop as the timeout.
            self.numbers.refused += 1
            message = "The bodies of the requests that run fill the memory set aside for them."
            if not self._may_hold(owner, size_bytes):
                message = "The bodies of this key's requests fill its share of the memory for bodies."
            raise Unavailable(f"{message} Try again later.", FULL_RETRY_AFTER_S, "body_memory_full") from None
        except asyncio.CancelledError:
            if entry.room.done() and not entry.room.cancelled():
                self.give_back(owner, size_bytes)
            raise
        finally:
            if entry in waiting:
                waiting.remove(entry)
                self._admit()

    def largest_bytes(self) -> int:
        """Return the size of the largest body that the limits allow."""
        return min(self._limit_bytes(), self._quota_bytes())

    def give_back(self, owner: str, size_bytes: int) -> None:
        self.numbers.used_bytes -= size_bytes
        self._held[owner] -= size_bytes
        if not self._held[owner]:
            del self._held[owner]
        self._admit()

    def _fits(self, size_bytes: int) -> bool:
        return self.numbers.used_bytes + size_bytes <= self._limit_bytes()

    def _may_hold(self, owner: str, size_bytes: int) -> bool:
        return self._held[owner] + size_bytes <= self._quota_bytes()

    def _take(self, owner: str, size_bytes: int) -> None:
        self.numbers.used_bytes += size_bytes
        self._held[owner] += size_bytes

    def _admit(self) -> None:
        at_quota: set[str] = set()
        for waiting in (self._small, self._large):
            for entry in list(waiting):
                if entry.room.done() or entry.owner in at_quota:
                    continue
                if not self._may_hold(entry.owner, entry.size_bytes):
                    at_quota.add(entry.owner)
                    continue
                if not self._fits(entry.size_bytes):
                    return
                waiting.remove(entry)
                self._take(entry.owner, entry.size_bytes)
                entry.room.set_result(None)


class BodyLease:
    """Memory lease for one request's body. The request's record owns the lease and closes it when the request has
    ended.
    """

    __slots__ = ("_bodies", "owner", "size_bytes")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        # Key to whose share the memory counts. It is set before the first byte.
        self.owner = ""
        self.size_bytes = 0

    async def reach(self, size_bytes: int) -> None:
        """Increase the reservation to `size_bytes`, waiting if needed. Raises `Unavailable` or `BodyTooLarge`."""
        more = size_bytes - self.size_bytes
        if more <= 0:
            return
        if size_bytes > (limit := self._bodies.largest_bytes()):
            raise BodyTooLarge(limit)
        is_small = size_bytes <= LARGE_BYTES
        if not self._bodies.take(self.owner, more, is_small=is_small):
            await self._bodies.wait(self.owner, more, is_small=is_small)
        self.size_bytes = size_bytes

    def may_ever_hold(self, more_bytes: int) -> bool:
        """Whether the limits allow `more_bytes` more, apart from what other requests use."""
        return self.size_bytes + more_bytes <= self._bodies.largest_bytes()

    def hold(self, more_bytes: int) -> bool:
        """Increase the reservation by `more_bytes` without waiting. Returns False if there is not enough memory."""
        if not more_bytes:
            return True
        if not self._bodies.take(self.owner, more_bytes, is_small=True):
            self._bodies.numbers.refused += 1
            return False
        self.size_bytes += more_bytes
        return True

    def close(self) -> None:
        if self.size_bytes:
            self._bodies.give_back(self.owner, self.size_bytes)
            self.size_bytes = 0
