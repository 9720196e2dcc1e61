"""Whether and when a worker that failed may be started again."""

from gateway.supervisor.backoff import HALF_OPEN_S, Breaker
from protocol.failures import Code, Failure


class Retry:
    """What is remembered of one model's failures. Owned by its worker's state machine; times are monotonic seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._breaker = Breaker()
        self._at = 0.0
        self.last_failure: Failure | None = None
        # Starting again cannot help until somebody changes something and says so.
        self.is_final = False
        self.has_crashed = False
        # Starts that followed a crash.
        self.restarts = 0

    @property
    def reason(self) -> Failure:
        """Why the model cannot be had."""
        return self.last_failure or Failure(Code.INTERNAL, f"model '{self._model}' is not available")

    def may_start(self, now: float) -> bool:
        return not self.is_final and now >= self._at

    def wait_s(self, now: float) -> float:
        """Until the next start is allowed; 0 when none will be by itself."""
        return 0.0 if self.is_final else max(0.0, self._at - now)

    def started(self) -> None:
        self.restarts += self.has_crashed
        self.is_final = self.has_crashed = False

    def ended(self, failure: Failure) -> None:
        """For good."""
        self.last_failure = failure
        self.is_final = True

    def crashed(
        self, failure: Failure, now: float, random: float, healthy_s: float | None, *, is_useful: bool
    ) -> tuple[float, bool]:
        """`healthy_s` is None while loading. Returns the delay, and if it is a long one."""
        self.last_failure = failure
        self.has_crashed = True
        self._breaker.crash(now, is_loading=healthy_s is None, healthy_s=healthy_s or 0.0, is_useful=is_useful)
        is_open = self._breaker.is_open(now)
        delay_s = HALF_OPEN_S if is_open else self._breaker.delay_s(random)
        self._at = now + delay_s
        return delay_s, is_open

    def forgive(self) -> None:
        """Somebody asked for another try."""
        self._breaker.reset()
        self.is_final = False
        self._at = 0.0
