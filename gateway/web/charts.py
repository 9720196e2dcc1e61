"""One sample per second of each model for ten minutes, so that charts are full as soon as the page is opened."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import astuple

from gateway.services import Services
from gateway.web.schemas import Chart, Charts
from gateway.workers.supervisor.state import WorkerView

INTERVAL_S: Final = 1.0
POINTS: Final = 600


@dataclass(slots=True)
class _Series:
    """One model's samples, and the values of its counters at the newest sample. Only `Sampler` changes it."""

    generated: int
    prompted: int
    chart: Chart = field(default_factory=lambda: Chart([], [], [], [], []))


class Sampler:
    """Samples models as long as the daemon runs. The cost does not depend on the number of requests or viewers."""

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
        for removed in self._series.keys() - {view.name for view in views}:
            del self._series[removed]

    def rates(self, model: str) -> tuple[float, float]:
        """Return generated and prompt tokens per second of a model, from its newest sample."""
        series = self._series.get(model)
        return (0.0, 0.0) if series is None else (series.chart.tokens_per_s[-1], series.chart.prompt_tokens_per_s[-1])

    def charts(self) -> Charts:
        """Return the samples of all models. A model that was added recently has fewer."""
        return Charts(self._until, INTERVAL_S, {name: series.chart for name, series in self._series.items()})

    def _add(self, view: WorkerView, span_s: float, footprint_bytes: int) -> None:
        numbers = self._services.metrics.model(view.name)
        series = self._series.get(view.name)
        if series is None:
            series = self._series[view.name] = _Series(numbers.generation_tokens, numbers.prompt_tokens_computed)
        chart = series.chart
        # A counter restarts at 0 if its model was removed and added again.
        chart.tokens_per_s.append(round(max(0, numbers.generation_tokens - series.generated) / span_s, 1))
        chart.prompt_tokens_per_s.append(round(max(0, numbers.prompt_tokens_computed - series.prompted) / span_s, 1))
        series.generated, series.prompted = numbers.generation_tokens, numbers.prompt_tokens_computed
        running = view.stats.running if view.stats else 0
        inside = self._services.admission.inside(view.name)
        chart.running.append(running)
        chart.waiting.append(max(view.stats.waiting if view.stats else 0, inside - running))
        chart.footprint_bytes.append(footprint_bytes)
        for samples in astuple(chart):
            del samples[:-POINTS]
