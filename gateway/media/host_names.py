"""DNS lookups of the hosts of media URLs, each in a daemon thread.

The event loop's own lookups share a few threads with those of upstreams, cannot be cancelled, and delay the
daemon's exit. Clients could block those threads with names whose servers never answer.
"""

import asyncio
import socket
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from threading import Thread
from typing import Final

from gateway.errors import FULL_RETRY_AFTER_S, Unavailable
from gateway.media.media_reference import FetchFailed

# Maximum concurrent lookups in total, and for one key. Further lookups for that key wait.
LOOKUPS_MAX: Final = 16
LOOKUPS_OF_KEY_MAX: Final = 2
# A request waits at most this long for its turn, and again this long for its lookup. A slower lookup runs until the
# system gives up, and its name is refused for `UNANSWERED_S`.
LOOKUP_TIMEOUT_S: Final = 5.0
UNANSWERED_S: Final = 60.0

Lookup = Callable[[str, int], list[str]]


def look_up(host: str, port: int) -> list[str]:
    """Return all addresses of a host name from the system's resolver. Blocks. Raises `OSError` and `UnicodeError`."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


class HostNames:
    """Running lookups, and host names whose servers do not answer. Used on the event loop only.

    A lookup counts until it ends, even if its request no longer waits.
    """

    def __init__(
        self, look_up: Lookup = look_up, lookup_s: float = LOOKUP_TIMEOUT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._look_up = look_up
        self._lookup_s = lookup_s
        self._clock = clock
        self._running = 0
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(LOOKUPS_OF_KEY_MAX))
        # Maps each refused name to the time when its refusal ends.
        self._unanswered: dict[str, float] = {}

    async def resolve(self, owner: str, host: str, port: int) -> list[str]:
        """Resolve a name to all its addresses. Raises `FetchFailed`, `OSError`, `UnicodeError`, `Unavailable`."""
        host = host.lower()
        place = self._places[owner]
        try:
            async with asyncio.timeout(self._lookup_s):
                await place.acquire()
        except TimeoutError:
            raise _full("Names of hosts of this key's media are being looked up, without an answer yet.") from None
        with ExitStack() as undo:
            # The place is released on an error; once a thread has started, the thread releases it.
            undo.callback(place.release)
            if self._unanswered.get(host, 0.0) > self._clock():
                raise self._no_answer()
            if self._running >= LOOKUPS_MAX:
                raise _full("Too many names of hosts of media are being looked up.")
            addresses = self._start(host, port, place)
            undo.pop_all()
        return await addresses

    def _start(self, host: str, port: int, place: asyncio.Semaphore) -> asyncio.Future[list[str]]:
        loop = asyncio.get_running_loop()
        addresses: asyncio.Future[list[str]] = loop.create_future()

        def finish(outcome: list[str] | Exception) -> None:
            self._running -= 1
            place.release()
            overdue.cancel()
            if addresses.done():
                return  # The lookup has timed out, or its request has ended.
            if isinstance(outcome, Exception):
                addresses.set_exception(outcome)
            else:
                addresses.set_result(outcome)

        def run() -> None:
            try:
                outcome = self._look_up(host, port)
            except Exception as error:  # The waiting request gets the error.
                outcome = error
            # The loop is closed if the daemon has exited without waiting for this thread.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(finish, outcome)

        Thread(target=run, name="media-lookup", daemon=True).start()
        overdue = loop.call_later(self._lookup_s, self._time_out, host, addresses)
        self._running += 1
        return addresses

    def _time_out(self, host: str, addresses: asyncio.Future[list[str]]) -> None:
        now = self._clock()
        self._unanswered = {name: until for name, until in self._unanswered.items() if until > now}
        self._unanswered[host] = now + UNANSWERED_S
        if not addresses.done():
            addresses.set_exception(self._no_answer())

    def _no_answer(self) -> FetchFailed:
        return FetchFailed(f"the name of its host was not resolved within {self._lookup_s:g} seconds")


def _full(message: str) -> Unavailable:
    return Unavailable(f"{message} Try again later.", FULL_RETRY_AFTER_S, "media_lookups_full")
