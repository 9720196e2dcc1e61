"""Phases of a request and their durations."""

from collections.abc import Iterator
from dataclasses import dataclass

from protocol.from_worker import Usage


@dataclass(slots=True)
class Phases:
    """Durations of a request's phases in seconds. Of several sequences, the longest duration counts.

    `loading_from` and `sent_at` are seconds after the request's arrival, None before these events. `load` is any wait
    for the model: for a load, for memory or for a new worker. The worker reports `queue`, `prefill` and `decode`.
    """

    loading_from: float | None = None
    load: float = 0.0
    sent_at: float | None = None
    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0

    def add(self, usage: Usage) -> None:
        """Add the worker's timings of a finished sequence."""
        self.queue = max(self.queue, usage.queue_ms / 1000)
        self.prefill = max(self.prefill, usage.prefill_ms / 1000)
        self.decode = max(self.decode, usage.decode_ms / 1000)

    def cut(self, now: float, prefill_from: float | None, first_token: float | None) -> None:
        """Estimate the phases of a request that ended before its worker reported them.

        All arguments are seconds after the request's arrival.
        """
        if self.sent_at is None:
            return
        started = prefill_from if prefill_from is not None else first_token
        self.queue = max(self.queue, (now if started is None else started) - self.sent_at)
        if started is not None:
            self.prefill = max(self.prefill, (now if first_token is None else first_token) - started)
        if first_token is not None:
            self.decode = max(self.decode, now - first_token)

    def spans(self) -> Iterator[tuple[str, float, float]]:
        """Yield the name, the start and the duration of each phase that took time."""
        if self.loading_from is not None and self.load > 0:
            yield "load", self.loading_from, self.load
        start = self.sent_at or 0.0
        for name, length in (("queue", self.queue), ("prefill", self.prefill), ("decode", self.decode)):
            if length > 0:
                yield name, start, length
            start += length

    def fields(self) -> dict[str, float]:
        """Return the durations as fields of a log line, in milliseconds."""
        named = {"load": self.load, "queue": self.queue, "prefill": self.prefill, "decode": self.decode}
        return {f"{name}_ms": round(length * 1000, 1) for name, length in named.items() if length > 0}
