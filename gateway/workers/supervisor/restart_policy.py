"""Restart policy: whether and when a failed worker may be started again (back-off, circuit breaker)."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from protocol.failures import Code, Failure

FIRST_DELAY_S: Final = 0.5
DELAY_CAP_S: Final = 30.0
HEALTHY_S: Final = 60.0
CRASH_WINDOW_S: Final = 600.0
OPEN_WEIGHT: Final = 5
HALF_OPEN_INTERVAL_S: Final = 300.0
# A crash while loading counts as this many crashes, because a load costs minutes and gigabytes.
LOADING_WEIGHT: Final = 2


@dataclass(slots=True)
class Breaker:
    """Circuit breaker and back-off of one worker's crashes. Owned by `RestartPolicy`; times are monotonic seconds.

    The first crash after a healthy minute causes no delay. The n-th crash after that one delays the next start by up to
    0.5·2ⁿ⁻¹ s and at most 30 s, with full jitter. Five crashes in ten minutes open the breaker, and then one start
    every five minutes is allowed. A crash while loading counts twice. If the worker had generated a token before it
    crashed, earlier crashes no longer count for the breaker.
    """

    _streak: int = 0
    _crashes: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def crash(self, now: float, *, is_loading: bool, healthy_s: float, is_useful: bool = False) -> None:
        """Count a crash of a worker that was ready for `healthy_s`."""
        if healthy_s >= HEALTHY_S:
            self._streak = 0
        if is_useful:
            self._crashes.clear()
        self._streak += 1
        self._crashes.append((now, LOADING_WEIGHT if is_loading else 1))

    def is_open(self, now: float) -> bool:
        while self._crashes and self._crashes[0][0] <= now - CRASH_WINDOW_S:
            self._crashes.popleft()
        return sum(weight for _, weight in self._crashes) >= OPEN_WEIGHT

    def delay_s(self, random: float) -> float:
        """Return the delay before the next start; `random` is uniform in [0, 1)."""
        if self._streak <= 1:
            return 0.0
        # The bound on the exponent avoids a float overflow.
        return random * min(DELAY_CAP_S, FIRST_DELAY_S * 2.0 ** min(self._streak - 2, 10))

    def reset(self) -> None:
        self._streak = 0
        self._crashes.clear()


class RestartPolicy:
    """Restart policy of one model's worker. Owned by the worker's state machine; times are monotonic seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._breaker = Breaker()
        self._next_start_at = 0.0
        self.last_failure: Failure | None = None
        # Whether any start will fail until the model or its configuration changes.
        self.is_final = False
        # Stamp of the model's files before the newest start.
        self._stamp: object = None
        self._has_crashed = False
        # Number of starts that followed a crash.
        self.restarts = 0

    @property
    def reason(self) -> Failure:
        """Return why the model is not available."""
        return self.last_failure or Failure(Code.INTERNAL, f"model '{self._model}' is not available")

    def may_start(self, now: float, stamp: object) -> bool:
        """Return whether a request may start the model. `stamp` is the present one of the model's files.

        A final failure ends when the files change: a download or an operator may have repaired them.
        """
        if self.is_final and stamp != self._stamp:
            self.reset()
        return not self.is_final and now >= self._next_start_at

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next start is allowed; 0 if no start is planned."""
        return 0.0 if self.is_final else max(0.0, self._next_start_at - now)

    def note_start(self, stamp: object) -> None:
        """Record a start with the stamp of the model's files. A start that follows a crash is counted."""
        self._stamp = stamp
        self.restarts += self._has_crashed
        self._has_crashed = False

    def note_final(self, failure: Failure) -> None:
        """Record a failure that a restart cannot fix."""
        self.last_failure = failure
        self.is_final = True

    def note_crash(
        self, failure: Failure, now: float, random: float, healthy_s: float | None, *, is_useful: bool
    ) -> tuple[float, bool]:
        """Count a crash. Return the delay of the next start, and whether the breaker is open.

        `healthy_s` is how long the worker was ready; None if it crashed while loading.
        """
        self.last_failure = failure
        self._has_crashed = True
        self._breaker.crash(now, is_loading=healthy_s is None, healthy_s=healthy_s or 0.0, is_useful=is_useful)
        is_open = self._breaker.is_open(now)
        delay_s = HALF_OPEN_INTERVAL_S if is_open else self._breaker.delay_s(random)
        self._next_start_at = now + delay_s
        return delay_s, is_open

    def reset(self) -> None:
        """Forget the failures, because an operator tries again."""
        self._breaker.reset()
        self.is_final = False
        self._next_start_at = 0.0
