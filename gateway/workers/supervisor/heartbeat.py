"""Heartbeat time-out of a worker, which ignores times when the gateway itself did not run."""

import logging

log = logging.getLogger(__name__)


class Heartbeat:
    """Times of the newest beat and answer. Owned by the worker's state machine; times are monotonic seconds."""

    def __init__(self, now: float, blackout_s: float) -> None:
        self._blackout_s = blackout_s
        self._beat_at = now
        self._answer_at = now

    def answered(self, now: float) -> None:
        self._answer_at = now

    def beat(self, now: float) -> float:
        """Seconds since the newest answer. The count restarts when our own loop did not run for a while."""
        gap_s, self._beat_at = now - self._beat_at, now
        if gap_s > self._blackout_s:
            # The machine slept, or this process was stopped: no answer could have been read.
            log.info("our own loop did not run for %.1f s: heartbeats start again", gap_s)
            self._answer_at = now
        return now - self._answer_at
