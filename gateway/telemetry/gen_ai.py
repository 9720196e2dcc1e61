"""OpenTelemetry's metrics of servers of generative AI, with Prometheus' names and the conventions' own buckets.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/#generative-ai-model-server-metrics
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric

from gateway.telemetry.histogram import Histogram

PROVIDER: Final = "mlxd"
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/api/generate": "text_completion",
    "/infill": "text_completion",
    "/completion": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
_DURATION_BUCKETS: Final = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_FIRST_TOKEN_BUCKETS: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_PER_TOKEN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_LABELS: Final = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model", "gen_ai_response_model")


def operation_of(path: str) -> str:
    """Return the conventions' name for what a path does; empty if they have none."""
    return _OPERATIONS.get(path, "")


class _DurationSeries:
    """Histograms of one metric, by operation, model and type of error."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...], *, has_errors: bool = False) -> None:
        self._name = f"gen_ai_server_{name}_seconds"
        self._text = text
        self._buckets = buckets
        self._has_errors = has_errors
        self._histograms: dict[tuple[str, str, str], Histogram] = {}

    def observe(self, operation: str, model: str, error: str, seconds: float) -> None:
        key = (operation, model, error)
        histogram = self._histograms.get(key)
        if histogram is None:
            histogram = self._histograms[key] = Histogram(self._buckets)
        histogram.observe(seconds)

    def forget(self, model: str) -> None:
        self._histograms = {key: each for key, each in self._histograms.items() if key[1] != model}

    def family(self) -> Metric:
        labels = [*_LABELS, "error_type"] if self._has_errors else [*_LABELS]
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        for (operation, model, error), histogram in self._histograms.items():
            values = [operation, PROVIDER, model, model, *([error] if self._has_errors else [])]
            family.add_metric(values, histogram.cumulative(), histogram.sum)
        return family


class GenAiMetrics:
    """Durations of requests. Used on the event loop only."""

    def __init__(self) -> None:
        self._duration = _DurationSeries(
            "request_duration", "Time from a request's arrival to its end.", _DURATION_BUCKETS, has_errors=True
        )
        self._first_token = _DurationSeries(
            "time_to_first_token", "Time to the first token of a successful request.", _FIRST_TOKEN_BUCKETS
        )
        self._per_token = _DurationSeries(
            "time_per_output_token",
            "Mean time of each token after the first, of successful requests with one sequence.",
            _PER_TOKEN_BUCKETS,
        )

    def observe(
        self,
        operation: str,
        model: str,
        duration_s: float,
        *,
        error: str = "",
        first_token_s: float | None = None,
        per_token_s: float | None = None,
    ) -> None:
        """Count a request that has ended. Requests without an error also have the times of their tokens."""
        self._duration.observe(operation, model, error, duration_s)
        if error:
            return
        if first_token_s is not None:
            self._first_token.observe(operation, model, "", first_token_s)
        if per_token_s is not None:
            self._per_token.observe(operation, model, "", per_token_s)

    def forget(self, model: str) -> None:
        """Drop the series of a model that is no longer configured."""
        for each in (self._duration, self._first_token, self._per_token):
            each.forget(model)

    def families(self) -> Iterator[Metric]:
        for each in (self._duration, self._first_token, self._per_token):
            yield each.family()
