"""Order to drain: all rows end within a time, and no new ones are taken until they have."""

import time
from dataclasses import dataclass

from protocol.messages import Drained


@dataclass(slots=True)
class DrainOrder:
    """The newest order, done or not. Owned by the engine thread; times are of the monotonic clock."""

    until: float | None = None
    aborted: int = 0
    # When the newest one ended: what came before, and took its time in the intake, is refused as well.
    ended: float = float("-inf")

    def begin(self, deadline_s: float) -> None:
        self.until = time.monotonic() + deadline_s

    @property
    def is_on(self) -> bool:
        return self.until is not None

    def refuses(self, arrived: float) -> bool:
        """Whether a row that arrived then is not taken."""
        return self.is_on or arrived <= self.ended

    def is_due(self, now: float) -> bool:
        """Whether rows that still run have had their time."""
        return self.until is not None and now >= self.until

    def end(self, epoch: int) -> Drained:
        """The answer, once no row is left."""
        answer = Drained(epoch, self.aborted)
        self.until, self.aborted, self.ended = None, 0, time.monotonic()
        return answer
