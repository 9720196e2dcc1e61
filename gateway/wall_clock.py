"""The wall clock, for ages of what is kept: a jump forward is believed only once it has lasted."""

import time
from collections.abc import Callable
from typing import Final

# A machine that slept, a clock that was set: beyond this it is a jump.
STEP_S: Final = 3600.0
# How long a clock that jumped must stay there, as this process counts, before what it makes old is deleted.
TRUST_S: Final = 3600.0


class WallClock:
    """Seconds since the epoch. Not thread-safe: each owner has one of its own.

    A clock that is set to next year, by mistake or at boot, must not delete everything at the next look.
    """

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._newest = wall()
        self._at = monotonic()
        self._jumped_at: float | None = None

    def resume(self, newest: float) -> None:
        """Go on from the newest time that an earlier process is known to have had."""
        self._newest = min(self._newest, newest)

    def __call__(self) -> float:
        wall, at = self._wall(), self._monotonic()
        expected = self._newest + at - self._at
        if wall - expected > STEP_S:
            if self._jumped_at is None:
                self._jumped_at = at
            if at - self._jumped_at < TRUST_S:
                return expected
        self._newest, self._at, self._jumped_at = wall, at, None
        return wall
