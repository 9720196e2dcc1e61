"""Clock for heartbeat time-outs, which stops while its own thread or event loop does not run."""

import time
from collections.abc import Callable


class RunClock:
    """Clock of one watcher of heartbeats, which calls `look` in each of its turns.

    A turn that took longer than `turn_s` counts as `turn_s`: the machine slept or was too busy to run the watcher, and
    no heartbeat could be received in that time.
    """

    def __init__(self, turn_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._turn_s = turn_s
        self._monotonic = monotonic
        self._looked_at = monotonic()
        self.now = 0.0

    def look(self) -> float:
        """Advance the clock and return the time of this turn."""
        at = self._monotonic()
        self.now += min(at - self._looked_at, self._turn_s)
        self._looked_at = at
        return self.now
