"""Wall clock for the ages of stored files. It follows a jump forward only after the jump has lasted."""

import time
from collections.abc import Callable
from typing import Final

# A longer step of the wall clock against the monotonic clock is a jump.
JUMP_S: Final = 3600.0
# A jump is followed after this time, as the monotonic clock counts it.
TRUST_S: Final = 3600.0


class WallClock:
    """Seconds since the epoch. It is not thread-safe: each owner has its own.

    A clock that is wrongly set to next year, for example at boot, must not expire every stored file at once.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._newest = wall()
        self._at = monotonic()
        self._jumped_at: float | None = None

    def resume(self, newest: float) -> None:
        """Continue from the newest time that an earlier process has recorded."""
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
