"""When a crashed worker may be started again."""

from collections import deque
from dataclasses import dataclass, field
from typing import Final

FIRST_DELAY_S: Final = 0.5
DELAY_CAP_S: Final = 30.0
HEALTHY_S: Final = 60.0
WINDOW_S: Final = 600.0
OPEN_AT: Final = 5
HALF_OPEN_S: Final = 300.0
# A model that dies while loading costs minutes and gigabytes each time.
LOADING_WEIGHT: Final = 2


@dataclass(slots=True)
class Breaker:
    """Counts the crashes of one worker. Owned by its state machine; times are monotonic seconds.

    The first crash after a healthy time costs no delay; the next ones 0.5·2ⁿ s with full jitter. Five crashes in ten
    minutes, those while loading counted twice, open the breaker; one try every five minutes is allowed then. A worker
    that has generated something was no part of a crash loop: the count begins anew with its crash.
    """

    _streak: int = 0
    _crashes: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def crash(self, now: float, *, is_loading: bool, healthy_s: float, is_useful: bool = False) -> None:
        """Count a crash of a worker that had been ready for `healthy_s`."""
        if healthy_s >= HEALTHY_S:
            self._streak = 0
        if is_useful:
            self._crashes.clear()
        self._streak += 1
        self._crashes.append((now, LOADING_WEIGHT if is_loading else 1))

    def is_open(self, now: float) -> bool:
        while self._crashes and self._crashes[0][0] <= now - WINDOW_S:
            self._crashes.popleft()
        return sum(weight for _, weight in self._crashes) >= OPEN_AT

    def delay_s(self, random: float) -> float:
        """How long to wait before the next start; `random` is uniform in [0, 1)."""
        if self._streak <= 1:
            return 0.0
        # The exponent is bounded so that a long streak cannot overflow a float.
        return random * min(DELAY_CAP_S, FIRST_DELAY_S * 2.0 ** min(self._streak - 2, 10))

    def reset(self) -> None:
        """Forget everything: an operator asked for another try."""
        self._streak = 0
        self._crashes.clear()
