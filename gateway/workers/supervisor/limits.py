"""Time limits of a worker: start, heartbeat, stop and restart."""

from dataclasses import dataclass, field

from gateway.link.failover import ResumeLimits


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker and its memory; times in seconds."""

    heartbeat_s: float = 1.0
    # A worker is stuck if it has sent no Pong for `pong_s`, or if its loop is busy and its newest step is older than
    # `step_s`.
    pong_s: float = 15.0
    step_s: float = 60.0
    # A stuck process gets Dump, SIGABRT after `dump_s` and SIGKILL after `abort_s` more.
    dump_s: float = 0.5
    abort_s: float = 5.0
    # A worker that cannot be reached, and has not exited after this time, is stuck.
    suspect_s: float = 2.0
    # A worker that must stop gets Shutdown, SIGTERM after `term_s` and SIGKILL after `stop_grace_s`.
    term_s: float = 2.0
    grace_s: float = 10.0
    grace_bytes_per_s: float = 4e9
    # An exit is judged only after this time, because the worker's Goodbye may still be in the socket.
    goodbye_s: float = 0.03
    # A new connection must become routable within `greet_s`; an adopted worker must respond within `adopt_s`.
    greet_s: float = 5.0
    adopt_s: float = 10.0
    drain_s: float = 30.0
    resume: ResumeLimits = field(default_factory=ResumeLimits)
    # Memory is measured each `measure_interval_s`. The pressure level rises at most once per `squeeze_s`, and falls by
    # one after `relax_s` without pressure.
    measure_interval_s: float = 1.0
    squeeze_s: float = 3.0
    relax_s: float = 30.0
    # A worker that stays at least `creep_bytes` above its share for `creep_s` is restarted. A model is restarted for
    # this at most once per `recycle_s`, and any model at most once per `recycle_gap_s`.
    creep_s: float = 10.0
    creep_bytes: int = 64 << 20
    recycle_s: float = 600.0
    recycle_gap_s: float = 60.0

    def stop_grace_s(self, weights_bytes: int) -> float:
        """Return the seconds from Shutdown to SIGKILL. A process killed while it frees wired memory may leak it."""
        return self.grace_s + weights_bytes / self.grace_bytes_per_s
