"""Queued job: one request of a turn loop, with its arrival, tenant and deadline."""

from dataclasses import dataclass

from protocol.from_worker import Usage


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedJob:
    """Request owned by the loop from the moment it leaves the intake. Its times are of the monotonic clock."""

    rid: int
    arrived: float
    priority: int = 0
    tenant: str = ""
    deadline: float | None = None
    wants_progress: bool = False
    # Deviations from the request that are reported to its client.
    relaxed: tuple[str, ...] = ()
    arrival: int = 0
    admitted: float = 0.0

    @property
    def tokens(self) -> int:
        """Number of input tokens."""
        raise NotImplementedError

    def usage(self, now: float) -> Usage:
        """Return the usage of this job so far."""
        admitted = self.admitted or now
        return Usage(
            prompt=self.tokens,
            cached=0,
            completion=0,
            queue_ms=(admitted - self.arrived) * 1e3,
            prefill_ms=(now - admitted) * 1e3,
        )
