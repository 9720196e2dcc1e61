"""Load (utilization) of a model. Routers use it to choose a daemon. It is computed on demand."""

from dataclasses import dataclass
from typing import Final

from gateway.config.settings import ModelConfig
from gateway.request.admission import Admission
from gateway.request.in_flight import Requests
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool.pool import Pool
from gateway.workers.supervisor.state import State

# DEFAULT_LOAD_S is assumed for a model that was never loaded. FAILED_LOAD_S is reported after a failed load, to keep
# routers away.
DEFAULT_LOAD_S: Final = 15.0
FAILED_LOAD_S: Final = 3600.0
_FAILED: Final = frozenset({State.FAILED, State.INCOMPATIBLE})


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Utilization of one model: `inside` sequences run or wait here; their prompts have `backlog_tokens` to process.

    `prefill_rate` is in tokens per second, 0 if none was measured. `wait_s` is the approximate time until a new
    request's prompt is processed, and `load_s` the approximate time to load the model, 0 if it is loaded.
    """

    state: State
    inside: int
    backlog_tokens: int
    prefill_rate: float
    wait_s: float
    load_s: float


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
        state = worker.state
        loads = numbers.load
        load_s = (
            loads.sum / loads.count
            if loads.count
            else self._pool.times.load_s(model.name, model.path) or DEFAULT_LOAD_S
        )
        if state is State.READY:
            load_s = 0.0
        elif state in _FAILED:
            load_s = FAILED_LOAD_S
        return ModelLoad(state, inside, backlog, rate, wait_s, load_s)
