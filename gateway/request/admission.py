"""Admission to a model's queue: at most `max_running + max_waiting` concurrent sequences, within each key's share."""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest, Overloaded, Unavailable

RETRY_AFTER_MIN_S: Final = 1.0
RETRY_AFTER_MAX_S: Final = 60.0
DRAIN_RETRY_AFTER_S: Final = 5.0
# Maximum concurrent requests that count or decode tokens, of all models together.
TOKENIZE_CALLS_PER_KEY_MAX: Final = 8
TOKENIZE_CALLS_MAX: Final = 64
# Weight of the newest request in the moving average of durations.
MEAN_WEIGHT: Final = 0.1


@dataclass(slots=True)
class _Queue:
    """Number of one model's admitted sequences, in total and by API key. `Admission` owns it."""

    inside: int = 0
    mean_s: float = 0.0
    by_key: Counter[str] = field(default_factory=Counter[str])

    def retry_after_s(self, slots: int) -> float:
        """Estimate the seconds until there is room for one more sequence. The result is within fixed limits."""
        expected = self.mean_s * self.inside / slots / 2
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, math.ceil(expected)))


class Admission:
    """Counts the leases of each model, on the event loop only. If a queue is full, a request is refused immediately."""

    def __init__(
        self, on_rejection: Callable[[str, str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_rejection = on_rejection
        self._clock = clock
        self._queues: defaultdict[str, _Queue] = defaultdict(_Queue)
        self._tokenize_calls: Counter[str] = Counter()
        # True once the daemon has begun to shut down.
        self.is_draining = False
        # True while an operator has paused the daemon.
        self.is_paused = False

    @property
    def takes_none(self) -> bool:
        """Whether new requests are refused."""
        return self.is_draining or self.is_paused

    @contextmanager
    def lease(
        self, model: ModelConfig, sequences: int = 1, key: str | None = None, share: int = 100
    ) -> Generator[None, None, None]:
        """Lease room for `sequences` of `model` within this context. The key may use `share` percent of the model's
        queue.

        Raises `BadRequest`, `Overloaded` or `Unavailable`.
        """
        queue = self._admit(model, sequences, key or "", share)
        started = self._clock()
        try:
            with self._inside(queue, sequences, key or ""):
                yield
        finally:
            taken = self._clock() - started
            queue.mean_s = queue.mean_s + MEAN_WEIGHT * (taken - queue.mean_s) if queue.mean_s else taken

    @contextmanager
    def tokenize_call(
        self, model: ModelConfig, key: str | None = None, share: int = 100
    ) -> Generator[None, None, None]:
        """Lease a place in the queue of `model` to count or decode tokens. Raises `Overloaded` or `Unavailable`."""
        calls = self._tokenize_calls
        if calls.total() >= TOKENIZE_CALLS_MAX or (key is not None and calls[key] >= TOKENIZE_CALLS_PER_KEY_MAX):
            self._reject(model.name, "questions")
            whose = "all" if key is None or calls[key] < TOKENIZE_CALLS_PER_KEY_MAX else "this key's"
            raise Overloaded(
                f"Too many concurrent requests to count or decode tokens, of {whose}. Try again.", RETRY_AFTER_MIN_S
            )
        name = key or ""
        # The duration does not change the average, which covers only generations.
        with self._inside(self._admit(model, 1, name, share), 1, name):
            calls[name] += 1
            try:
                yield
            finally:
                calls[name] -= 1
                if not calls[name]:
                    del calls[name]

    def check_open(self, model: str) -> None:
        """Raises `Unavailable` if new requests are refused now."""
        if self.takes_none:
            self._reject(model, "draining")
            reason = "The server is shutting down." if self.is_draining else "The server was drained by its operator."
            raise Unavailable(reason, DRAIN_RETRY_AFTER_S, "draining")

    def check(self, model: ModelConfig, sequences: int, share: int = 100) -> None:
        """Raises `BadRequest` if the request has more sequences than the model's queue, or the key's share of it, can
        ever hold.
        """
        most = _part(model.slots + model.max_waiting, share)
        if sequences > most:
            self._reject(model.name, "too_many_sequences")
            whose = model.name if share == 100 else f"{model.name}, for one key,"
            raise BadRequest(f"{sequences} sequences in one request; {whose} takes at most {most}.", "n")

    @property
    def is_idle(self) -> bool:
        """Whether no model has a request. Those of batches do not count, because they have no lease."""
        return not any(queue.inside for queue in self._queues.values())

    def inside(self, model: str) -> int:
        """Return the number of sequences of `model` that have a lease now."""
        return self._queues[model].inside

    def mean_s(self, model: str) -> float:
        """Return the mean duration of recent requests of `model`; 0 if none has ended."""
        return self._queues[model].mean_s

    @contextmanager
    def _inside(self, queue: _Queue, sequences: int, key: str) -> Generator[None, None, None]:
        queue.inside += sequences
        queue.by_key[key] += sequences
        try:
            yield
        finally:
            queue.inside -= sequences
            queue.by_key[key] -= sequences
            if not queue.by_key[key]:
                del queue.by_key[key]

    def _admit(self, model: ModelConfig, sequences: int, key: str, share: int) -> _Queue:
        queue, bound = self._queues[model.name], model.slots + model.max_waiting
        self.check_open(model.name)
        self.check(model, sequences, share)
        if queue.inside + sequences > bound:
            self._reject(model.name, "queue_full")
            raise Overloaded(
                f"The queue of {model.name} is full ({queue.inside} of {bound}). Try again later.",
                queue.retry_after_s(model.slots),
            )
        most = _part(bound, share)
        own = queue.by_key[key]
        if share < 100 and own + sequences > most:
            self._reject(model.name, "key_share")
            raise Overloaded(
                f"This key has {own} of the {most} places in the queue of {model.name} that one key may have. "
                "Try again later.",
                queue.retry_after_s(model.slots),
            )
        return queue

    def _reject(self, model: str, reason: str) -> None:
        if self._on_rejection is not None:
            self._on_rejection(model, reason)


def _part(bound: int, share: int) -> int:
    return max(1, bound * share // 100)
