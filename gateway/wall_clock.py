"""Wall clock for the ages of stored files. After a jump forward of the system's clock, it follows only after a
while."""

import time
from collections.abc import Callable
from typing import Final

# A difference of more than this between the wall clock and the monotonic clock is a jump.
JUMP_S: Final = 3600.0
# The clock follows a jump after this time on the monotonic clock.
TRUST_S: Final = 3600.0


class WallClock:
    """Returns seconds since the epoch. It is not thread-safe, so each owner needs its own instance.

    If the system's clock is wrongly set to next year, for example at boot, stored files must not all expire
    immediately.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._newest = wall()
        self._at = monotonic()
        self._jumped_at: float | None = None

    def resume(self, newest: float) -> None:
        """Continue from `newest`, the newest time that an earlier process has recorded."""
        self._newest = min(self._newest, newest)

    def __call__(self) -> float:
        wall, at = self._wall(), self._monotonic()
        expected = self._newest + at - self._at
        if wall - expected > JUMP_S:
            if self._jumped_at is None:
                self._jumped_at = at
            if at - self._jumped_at < TRUST_S:
                return expected
        self._newest, self._at, self._jumped_at = wall, at, None
        return wall
