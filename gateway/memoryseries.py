"""The Prometheus series of the memory broker; `exposition.py` yields them with all others."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric

from gateway.pool.state import MemoryView

if TYPE_CHECKING:
    from gateway.metrics import Metrics


def memory_series(metrics: "Metrics") -> Iterator[Metric]:
    """As of the newest look, about a second ago at most."""
    returned = GaugeMetricFamily(
        "mlxd_model_memory_returned_ratio",
        "The part of a process's memory that the system had back within two seconds of its newest unload.",
        labels=["model"],
    )
    for model, numbers in metrics.models.items():
        if numbers.returned_part is not None:
            returned.add_metric([model], numbers.returned_part)
    yield returned
    if metrics.memory_view is not None:
        yield from _shares(metrics.memory_view)


def _shares(view: MemoryView) -> Iterator[Metric]:
    for name, text, value in (
        ("budget", "What all models may take together.", view.budget_bytes),
        ("granted", "What is granted to models, with what ended processes still hold.", view.granted_bytes),
        ("footprint", "What the processes of all models hold, as measured.", view.footprint_bytes),
    ):
        yield GaugeMetricFamily(f"mlxd_memory_{name}_bytes", text, value=value)
    shares = GaugeMetricFamily("mlxd_model_memory_granted_bytes", "A model's share of the budget.", labels=["model"])
    footprints = GaugeMetricFamily(
        "mlxd_model_memory_footprint_bytes", "What a model's process holds, as measured from outside.", labels=["model"]
    )
    for model, memory in view.models.items():
        shares.add_metric([model], memory.share_bytes)
        footprints.add_metric([model], memory.footprint_bytes)
    yield from (shares, footprints)
