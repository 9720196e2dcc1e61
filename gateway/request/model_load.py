"""Load (utilization) of a model. Routers use it to choose a daemon. It is computed on demand."""

from typing import NamedTuple

from gateway.config.settings import ModelConfig
from gateway.request.admission import Admission
from gateway.request.in_flight import Requests
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool.pool import Pool


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
