"""Escalating memory-pressure levels for a worker above its share, with hysteresis."""

from dataclasses import dataclass
from typing import Final

from gateway.workers.supervisor.state import WorkerLimits

# Pages are not returned the moment that they are free.
TOLERANCE: Final = 0.02
# A worker that stays this much above its share, in spite of all measures, is restarted.
CREEP_PART: Final = 0.1


@dataclass(frozen=True, slots=True)
class PressureMeasure:
    """The parts of its KV and of its prefix cache that a worker may use, and whether it takes new requests."""

    kv_part: float = 1.0
    cache_part: float = 1.0
    is_refusing: bool = False


# Caches first, then rows make room for each other, and at last new requests are turned away.
MEASURES: Final = (
    PressureMeasure(),
    PressureMeasure(1.0, 0.25),
    PressureMeasure(0.5, 0.1),
    PressureMeasure(0.25, 0.1, is_refusing=True),
)


@dataclass(slots=True)
class Pressure:
    """One worker's. Owned by the broker; times are monotonic seconds."""

    limits: WorkerLimits
    level: int = 0
    _changed_at: float = float("-inf")
    _well_since: float | None = None
    _creeps_since: float | None = None

    @property
    def measure(self) -> PressureMeasure:
        return MEASURES[self.level]

    def observe(self, now: float, footprint: int, share: int, *, is_short: bool) -> bool:
        """One look at it; returns whether the measure is another now. `is_short`: the whole machine lacks memory."""
        is_creeping = footprint > share + max(self.limits.creep_bytes, int(share * CREEP_PART))
        if not is_creeping:
            self._creeps_since = None
        elif self._creeps_since is None:
            self._creeps_since = now
        before = self.level
        if is_short or footprint > share * (1 + TOLERANCE):
            self._well_since = None
            # It may keep a few bytes too many forever, but not refuse requests that there is memory for.
            most = len(MEASURES) - 1 if is_short else len(MEASURES) - 2
            if self.level < most and now - self._changed_at >= self.limits.squeeze_s:
                self.level += 1
            elif self.level > most:
                self.level = most
        elif self.level:
            self._well_since = now if self._well_since is None else self._well_since
            if now - self._well_since >= self.limits.relax_s:
                self.level -= 1
                self._well_since = now
        if self.level != before:
            self._changed_at = now
        return self.level != before

    def is_hopeless(self, now: float) -> bool:
        """Whether only a restart of the process can help."""
        return self._creeps_since is not None and self.level > 0 and now - self._creeps_since >= self.limits.creep_s
