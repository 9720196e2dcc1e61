"""Escalating memory-pressure levels for a worker above its share, with hysteresis."""

from dataclasses import dataclass
from typing import Final

from gateway.workers.supervisor.limits import WorkerLimits

# A footprint may exceed its share by this fraction, because freed pages are returned to the system with a delay.
TOLERANCE: Final = 0.02
# A worker that stays above its share by this fraction, despite the measures, is restarted.
CREEP_PART: Final = 0.1


@dataclass(frozen=True, slots=True)
class PressureMeasure:
    """Fractions of its KV and prefix cache that a worker may use, and whether it refuses new requests."""

    kv_part: float = 1.0
    cache_part: float = 1.0
    is_refusing: bool = False


# Each measure is stronger than the previous one: caches shrink, then rows are preempted, then requests are refused.
MEASURES: Final = (
    PressureMeasure(),
    PressureMeasure(1.0, 0.25),
    PressureMeasure(0.5, 0.1),
    PressureMeasure(0.25, 0.1, is_refusing=True),
)


@dataclass(slots=True)
class Pressure:
    """Pressure level of one worker. Owned by the broker; times are monotonic seconds."""

    limits: WorkerLimits
    level: int = 0
    _changed_at: float = float("-inf")
    _relaxed_since: float | None = None
    _creeping_since: float | None = None

    @property
    def measure(self) -> PressureMeasure:
        return MEASURES[self.level]

    def observe(self, now: float, footprint: int, share: int, *, is_short: bool) -> bool:
        """Update the level, and return whether it changed. `is_short` means that the machine is short of memory."""
        is_creeping = footprint > share + max(self.limits.creep_bytes, int(share * CREEP_PART))
        if not is_creeping:
            self._creeping_since = None
        elif self._creeping_since is None:
            self._creeping_since = now
        before = self.level
        if is_short or footprint > share * (1 + TOLERANCE):
            self._relaxed_since = None
            # Only a machine that is short of memory makes a worker refuse new requests: a worker slightly above its
            # share may stay there.
            most = len(MEASURES) - 1 if is_short else len(MEASURES) - 2
            if self.level < most and now - self._changed_at >= self.limits.squeeze_s:
                self.level += 1
            elif self.level > most:
                self.level = most
        elif self.level:
            self._relaxed_since = now if self._relaxed_since is None else self._relaxed_since
            if now - self._relaxed_since >= self.limits.relax_s:
                self.level -= 1
                self._relaxed_since = now
        if self.level != before:
            self._changed_at = now
        return self.level != before

    def is_hopeless(self, now: float) -> bool:
        """Whether only a restart of the process can lower its memory."""
        return self._creeping_since is not None and self.level > 0 and now - self._creeping_since >= self.limits.creep_s
