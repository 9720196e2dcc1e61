"""Ten minutes of one sample per second of each model, so that charts are full as soon as the page is opened."""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from gateway.services import Services
from gateway.web.schemas import Chart, Charts
from gateway.workers.supervisor.state import WorkerView

INTERVAL_S: Final = 1.0
POINTS: Final = 600


@dataclass(slots=True)
class Rates:
    """Tokens per second of one model in the newest interval."""

    tokens_per_s: float = 0.0
    prompt_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Point:
    tokens_per_s: float
    prompt_tokens_per_s: float
    running: int
    waiting: int
    footprint_bytes: int


@dataclass(slots=True)
class _Series:
    """One model's samples, and its counters at the newest. Owned by `Sampler`."""

    generated: int
    prompted: int
    rates: Rates = field(default_factory=Rates)
    points: deque[_Point] = field(default_factory=lambda: deque(maxlen=POINTS))


class Sampler:
    """Samples models while the daemon runs. Its cost does not depend on requests or viewers."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._series: dict[str, _Series] = {}
        self._newest = time.monotonic()
        self._until = time.time()

    async def run(self) -> None:
        """Sample periodically, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.sample()

    def sample(self) -> None:
        """Add one sample for each model."""
        services, now = self._services, time.monotonic()
        span_s, self._newest, self._until = max(now - self._newest, 1e-3), now, time.time()
        memory = services.pool.memory().models
        views = services.pool.workers()
        for view in views:
            own = memory.get(view.name)
            self._add(view, span_s, own.footprint_bytes if own is not None else 0)
        for gone in self._series.keys() - {view.name for view in views}:
            del self._series[gone]

    def rates(self, model: str) -> Rates:
        """Return a model's newest rates."""
        series = self._series.get(model)
        return Rates() if series is None else series.rates

    def charts(self) -> Charts:
        """Return all samples. A new model has fewer."""
        models = {name: _chart(series.points) for name, series in self._series.items()}
        return Charts(self._until, INTERVAL_S, models)

    def _add(self, view: WorkerView, span_s: float, footprint_bytes: int) -> None:
        numbers = self._services.metrics.model(view.name)
        series = self._series.get(view.name)
        if series is None:
            series = self._series[view.name] = _Series(numbers.generation_tokens, numbers.prompt_tokens)
        rates = series.rates
        # Counters restart if a model was removed and added again.
        rates.tokens_per_s = round(max(0, numbers.generation_tokens - series.generated) / span_s, 1)
        rates.prompt_tokens_per_s = round(max(0, numbers.prompt_tokens - series.prompted) / span_s, 1)
        series.generated, series.prompted = numbers.generation_tokens, numbers.prompt_tokens
        running = view.stats.running if view.stats else 0
        inside = self._services.admission.inside(view.name)
        waiting = max(view.stats.waiting if view.stats else 0, inside - running)
        point = _Point(rates.tokens_per_s, rates.prompt_tokens_per_s, running, waiting, footprint_bytes)
        series.points.append(point)


def _chart(points: deque[_Point]) -> Chart:
    return Chart(
        [point.tokens_per_s for point in points],
        [point.prompt_tokens_per_s for point in points],
        [point.running for point in points],
        [point.waiting for point in points],
        [point.footprint_bytes for point in points],
    )
