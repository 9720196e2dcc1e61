"""Admission to a model's queue: at most `max_running` and WAITING_MAX concurrent sequences, within each key's share.

Gate for requests of batches: whether they may start now, so that they take nothing from other requests.

Load (utilization) of a model. Routers use it to choose a daemon. It is computed on demand.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gateway.config.settings import ModelConfig
from gateway.errors import BUSY_RETRY_AFTER_S, DRAIN_RETRY_AFTER_S, BadRequest, Overloaded, Unavailable
from gateway.request.in_flight import Requests
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool import Pool
from gateway.workers.power import is_on_battery, run_tool

# Maximum number of sequences that wait in a model's queue.
WAITING_MAX: Final = 1024
RETRY_AFTER_MAX_S: Final = 60.0
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
        return min(RETRY_AFTER_MAX_S, max(BUSY_RETRY_AFTER_S, expected))


class Admission:
    """Counts the leases of each model, on the event loop only. If a queue is full, a request is refused immediately."""

    def __init__(
        self, on_rejection: Callable[[str, str], None] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.waiting_max = WAITING_MAX
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
        self, model: ModelConfig, sequences: int = 1, key: str | None = None, quota_percent: int = 100
    ) -> Generator[None, None, None]:
        """Lease room for `sequences` of `model` within this context. The key may use `quota_percent` of the model's
        queue.

        Raises `BadRequest`, `Overloaded` or `Unavailable`.
        """
        queue = self._admit(model, sequences, key or "", quota_percent)
        started = self._clock()
        try:
            with self._inside(queue, sequences, key or ""):
                yield
        finally:
            taken = self._clock() - started
            queue.mean_s = queue.mean_s + MEAN_WEIGHT * (taken - queue.mean_s) if queue.mean_s else taken

    @contextmanager
    def tokenize_call(
        self, model: ModelConfig, key: str | None = None, quota_percent: int = 100
    ) -> Generator[None, None, None]:
        """Lease a place in the queue of `model` to count or decode tokens. Raises `Overloaded` or `Unavailable`."""
        calls = self._tokenize_calls
        if calls.total() >= TOKENIZE_CALLS_MAX or (key is not None and calls[key] >= TOKENIZE_CALLS_PER_KEY_MAX):
            self._reject(model.name, "questions")
            whose = "all" if key is None or calls[key] < TOKENIZE_CALLS_PER_KEY_MAX else "this key's"
            raise Overloaded(
                f"Too many concurrent requests to count or decode tokens, of {whose}. Try again.", BUSY_RETRY_AFTER_S
            )
        name = key or ""
        # The duration does not change the average, which covers only generations.
        with self._inside(self._admit(model, 1, name, quota_percent), 1, name):
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

    def check(self, model: ModelConfig, sequences: int, quota_percent: int = 100) -> None:
        """Raises `BadRequest` if the request has more sequences than the model's queue, or the key's quota of it, can
        ever hold.
        """
        most = _part(self.bound(model), quota_percent)
        if sequences > most:
            self._reject(model.name, "too_many_sequences")
            whose = model.name if quota_percent == 100 else f"{model.name}, for one key,"
            raise BadRequest(f"{sequences} sequences in one request; {whose} takes at most {most}.", "n")

    @property
    def is_idle(self) -> bool:
        """Whether no model has a request. Those of batches do not count, because they have no lease."""
        return not any(queue.inside for queue in self._queues.values())

    def bound(self, model: ModelConfig) -> int:
        """Return the maximum number of sequences of `model` that may run and wait."""
        return model.slots + self.waiting_max

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

    def _admit(self, model: ModelConfig, sequences: int, key: str, quota_percent: int) -> _Queue:
        queue, bound = self._queues[model.name], self.bound(model)
        self.check_open(model.name)
        self.check(model, sequences, quota_percent)
        if queue.inside + sequences > bound:
            self._reject(model.name, "queue_full")
            raise Overloaded(
                f"The queue of {model.name} is full ({queue.inside} of {bound}). Try again later.",
                queue.retry_after_s(model.slots),
            )
        most = _part(bound, quota_percent)
        own = queue.by_key[key]
        if quota_percent < 100 and own + sequences > most:
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


def _part(bound: int, quota_percent: int) -> int:
    return max(1, bound * quota_percent // 100)


POLL_S: Final = 0.25
POWER_INTERVAL_S: Final = 30.0
# A model that finds no room is looked at again after this time, because the look reads its files.
ROOM_INTERVAL_S: Final = 5.0


class BatchGate:
    """Decides on the event loop. A worker that has other requests preempts those of batches by itself."""

    def __init__(
        self,
        admission: Admission,
        pool: Pool,
        on_battery: Callable[[], bool] = lambda: is_on_battery(run_tool),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_battery` is called in a thread."""
        self._admission = admission
        self._pool = pool
        self._on_battery = on_battery
        self._clock = clock
        self._read_at = float("-inf")
        self._is_on_battery = False
        # Times until which models that found no room are not asked for again.
        self._full_until: dict[str, float] = {}

    async def is_open(self) -> bool:
        """Whether no other request runs or waits, no model waits for memory, and the machine has mains power."""
        now = self._clock()
        if now - self._read_at >= POWER_INTERVAL_S:
            self._read_at = now
            self._is_on_battery = await asyncio.to_thread(self._on_battery)
        if self._admission.takes_none or self._is_on_battery:
            return False
        return self._admission.is_idle and not self._pool.broker.view().waiting

    async def admits(self, model: str) -> bool:
        """Whether a request of a batch may start on this model: no other model may be unloaded for it."""
        if not await self.is_open() or self._clock() < self._full_until.get(model, 0.0):
            return False
        fits = await self._pool.fits(model)
        if not fits:
            self._full_until[model] = self._clock() + ROOM_INTERVAL_S
        return fits


class ModelLoad(NamedTuple):
    """Utilization of one model: the prompts of its requests have `backlog_tokens` to process, and `wait_s` is the
    approximate time until a new request's prompt is processed, without a load.
    """

    backlog_tokens: int
    wait_s: float


class LoadMeter:
    """Computes the utilization of models from requests, admission and metrics."""

    def __init__(self, pool: Pool, requests: Requests, admission: Admission, metrics: Metrics) -> None:
        self._pool = pool
        self._requests = requests
        self._admission = admission
        self._metrics = metrics

    def read(self, model: ModelConfig) -> ModelLoad:
        """Compute the utilization of a configured model."""
        inside = backlog = 0
        for served in self._requests.of(model.name):
            if served.record.served_by or served.record.is_of_batch_class:
                continue
            inside += served.sequences
            if served.record.first_token_s is None:
                backlog += max(0, served.prompt_tokens - served.prefilled_tokens)
        numbers = self._metrics.model(model.name)
        rate = numbers.prefill_rate
        worker = self._pool.worker(model.name)
        slots = worker.ready.max_running if worker.ready is not None else model.slots
        # If all slots are taken, the next request waits for one.
        beyond = max(0, inside + 1 - slots)
        wait_s = beyond * self._admission.mean_s(model.name) / slots
        if rate > 0:
            wait_s += backlog / rate
        return ModelLoad(backlog, wait_s)
