"""Rests of the step loop, which leave a desktop's display a part of the GPU's time."""

from typing import Final

# With less, requests would hardly end.
LEAST_DUTY: Final = 0.05
# A rest is no longer than this, whatever came before it: streams go on.
LONGEST_S: Final = 2.0


class Rests:
    """Duty cycle of the loop: after t seconds of work it rests for t · (1/duty − 1). Owned by the engine thread.

    Times are of the monotonic clock. Commands are taken during a rest, and do not make it shorter.
    """

    def __init__(self) -> None:
        self.duty = 1.0
        self._until = 0.0

    def set_duty(self, duty: float) -> None:
        """The part of the time in which there is work."""
        self.duty = min(1.0, max(LEAST_DUTY, duty))

    @property
    def is_on(self) -> bool:
        return self.duty < 1.0

    def worked(self, began: float, ended: float) -> None:
        """Rest for this work, in addition to what was left."""
        rest_s = min(LONGEST_S, max(0.0, ended - began) * (1 / self.duty - 1))
        self._until = min(max(self._until, ended) + rest_s, ended + LONGEST_S)

    def left_s(self, now: float) -> float:
        """Seconds of rest that are left; none with a full duty."""
        return max(0.0, self._until - now) if self.is_on else 0.0
