"""Rest periods of a loop, which leave a part of the GPU's time to a desktop's display."""

from typing import Final

# With a lower duty, requests would hardly ever end.
MIN_DUTY: Final = 0.05
# A rest is at most this long, so that streams continue.
MAX_REST_S: Final = 2.0


class Rests:
    """Duty cycle of a loop: after t seconds of work it rests for t · (1/duty − 1). Owned by the loop's thread.

    Times are of the monotonic clock. Commands are handled during a rest, but do not shorten it.
    """

    def __init__(self) -> None:
        self.duty = 1.0
        self._until = 0.0
        # Seconds of all rests since the start.
        self.total_s = 0.0

    def set_duty(self, duty: float) -> None:
        """Set the fraction of the time that is for work."""
        self.duty = min(1.0, max(MIN_DUTY, duty))

    @property
    def is_on(self) -> bool:
        return self.duty < 1.0

    def worked(self, began: float, ended: float) -> None:
        """Add the rest that this work requires to the rest that is left."""
        rest_s = min(MAX_REST_S, max(0.0, ended - began) * (1 / self.duty - 1))
        self.total_s += rest_s
        self._until = min(max(self._until, ended) + rest_s, ended + MAX_REST_S)

    def left_s(self, now: float) -> float:
        """Return the seconds of rest that are left; 0 with a full duty."""
        return max(0.0, self._until - now) if self.is_on else 0.0
