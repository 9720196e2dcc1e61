"""Prometheus metrics: one registry per app."""

from prometheus_client import CollectorRegistry

from protocol.messages import Pong, Step


class Metrics:
    """Every series of one gateway. What the pool and the link report arrives through the `Events` methods."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

    def step(self, model: str, step: Step) -> None:
        """One decoded `Step`."""

    def pong(self, model: str, pong: Pong) -> None:
        """One heartbeat answered."""

    def worker_exit(self, model: str, status: int) -> None:
        """A worker process ended."""

    def state(self, model: str, state: str) -> None:
        """A worker's state machine moved."""

    def load_seconds(self, model: str, s: float) -> None:
        """A load took this long, from spawn to Ready."""

    def stale_message(self) -> None:
        """A message of an older epoch was dropped."""

    def malformed_frame(self) -> None:
        """A frame that is no message was dropped."""

    def stuck(self, model: str) -> None:
        """A worker's step age passed its limit."""
