"""Who may come in: at most `max_running + max_waiting` sequences of a model are inside at once."""

import math
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from gateway.config import ModelConfig
from gateway.errors import BadRequest, Overloaded, Unavailable

RETRY_AFTER_MIN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0
DRAIN_RETRY_AFTER_S: Final = 5.0
# How much the newest request says about how long one takes.
SMOOTHING: Final = 0.1


@dataclass(slots=True)
class _Queue:
    """One model's count. Owned by `Admission`."""

    bound: int
    slots: int
    inside: int = 0
    mean_s: float = 0.0

    def retry_after_s(self) -> float:
        """About when the sequences inside will have made room for one more."""
        expected = self.mean_s * self.inside / self.slots / 2
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, math.ceil(expected)))


class Admission:
    """Counts leases per model. Everything happens on the event loop, without a wait: a full queue answers at once."""

    def __init__(
        self, on_rejection: Callable[[str, str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_rejection = on_rejection
        self._clock = clock
        self._queues: dict[str, _Queue] = {}
        self.is_draining = False

    @contextmanager
    def lease(self, model: ModelConfig, sequences: int = 1) -> Generator[None, None, None]:
        """Hold room for `sequences` of `model`. Raises `Overloaded` or `Unavailable`; leaves nothing behind."""
        queue = self._admit(model, sequences)
        started = self._clock()
        queue.inside += sequences
        try:
            yield
        finally:
            queue.inside -= sequences
            taken = self._clock() - started
            queue.mean_s = queue.mean_s + SMOOTHING * (taken - queue.mean_s) if queue.mean_s else taken

    def inside(self, model: str) -> int:
        """Sequences of `model` that hold a lease now."""
        queue = self._queues.get(model)
        return queue.inside if queue else 0

    def _admit(self, model: ModelConfig, sequences: int) -> _Queue:
        queue = self._queues.get(model.name)
        if queue is None:
            queue = self._queues[model.name] = _Queue(0, 0)
        queue.bound, queue.slots = model.max_running + model.max_waiting, model.max_running
        if self.is_draining:
            self._reject(model, "draining")
            raise Unavailable("The server is shutting down.", DRAIN_RETRY_AFTER_S, "draining")
        if sequences > queue.bound:
            self._reject(model, "too_many_sequences")
            raise BadRequest(f"{sequences} sequences in one request; {model.name} takes at most {queue.bound}.", "n")
        if queue.inside + sequences > queue.bound:
            self._reject(model, "queue_full")
            raise Overloaded(
                f"The queue of {model.name} is full ({queue.inside} of {queue.bound}). Try again later.",
                queue.retry_after_s(),
            )
        return queue

    def _reject(self, model: ModelConfig, reason: str) -> None:
        if self._on_rejection is not None:
            self._on_rejection(model.name, reason)
