"""Load of a model at this daemon, as peers and routers score places by it. Computed when asked for; counts nothing."""

from dataclasses import dataclass
from typing import Final

from gateway.config.settings import ModelConfig
from gateway.request.admission import Admission
from gateway.request.in_flight import Requests
from gateway.telemetry.metrics import Metrics
from gateway.workers.pool.pool import Pool
from gateway.workers.supervisor.state import State

# A load of a model that was never loaded takes about so long, and one that has failed is no choice.
LOAD_S: Final = 15.0
FAILED_S: Final = 3600.0
_FAILED: Final = frozenset({State.FAILED, State.INCOMPATIBLE})


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """`inside` are sequences that run or wait here; `backlog_tokens` those of their prompts that are not processed.

    `prefill_rate` is in tokens a second, 0 before any was measured. `wait_s` is about how long a new request waits
    before its prompt is processed, and `load_s` about how long the model takes to load; 0 when it is loaded.
    """

    state: State
    inside: int
    backlog_tokens: int
    prefill_rate: float
    wait_s: float
    load_s: float


class LoadMeter:
    """Reads what requests, admission and metrics know of a model."""

    def __init__(self, pool: Pool, requests: Requests, admission: Admission, metrics: Metrics) -> None:
        self._pool = pool
        self._requests = requests
        self._admission = admission
        self._metrics = metrics

    def read(self, model: ModelConfig) -> ModelLoad:
        """The load of a configured model."""
        inside = backlog = 0
        for served in self._requests.of(model.name):
            if served.record.served_by:
                continue
            inside += served.sequences
            if served.record.first_token_s is None:
                backlog += max(0, served.prompt_tokens - served.prefilled_tokens)
        numbers = self._metrics.model(model.name)
        rate = numbers.prefill_rate
        worker = self._pool.worker(model.name)
        slots = worker.ready.max_running if worker.ready is not None else model.slots
        # Once all slots are taken the next request waits for one of them to end.
        beyond = max(0, inside + 1 - slots)
        wait_s = beyond * self._admission.mean_s(model.name) / slots
        if rate > 0:
            wait_s += backlog / rate
        state = worker.state
        loads = numbers.load
        load_s = loads.sum / loads.count if loads.count else self._pool.times.load_s(model.name, model.path) or LOAD_S
        if state is State.READY:
            load_s = 0.0
        elif state in _FAILED:
            load_s = FAILED_S
        return ModelLoad(state, inside, backlog, rate, wait_s, load_s)
