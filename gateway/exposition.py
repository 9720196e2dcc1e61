"""Prometheus' view of `Metrics`: names, help and labels. vLLM's suffixes and units under `mlxd_`."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import protocol
from gateway.histogram import Histogram
from gateway.logs import dropped_records
from gateway.memoryseries import memory_series
from gateway.vllm_names import with_vllm_names
from protocol.stats import Stats

if TYPE_CHECKING:
    from gateway.metrics import Metrics, ModelMetrics

STATES: Final = (
    "stopped", "starting", "loading", "ready", "draining", "stopping", "backoff", "failed", "incompatible",
)  # fmt: skip

_HISTOGRAMS: Final[tuple[tuple[str, str, "Callable[[ModelMetrics], Histogram]"], ...]] = (
    ("time_to_first_token_seconds", "From the request's arrival to its first token.", lambda m: m.ttft),
    ("inter_token_latency_seconds", "Between two tokens of a sequence, as the gateway receives them.", lambda m: m.itl),
    ("request_time_per_output_token_seconds", "Mean decode time per token of a sequence.", lambda m: m.per_token),
    ("e2e_request_latency_seconds", "From the request's arrival to its end.", lambda m: m.e2e),
    ("request_queue_time_seconds", "A sequence waiting in the worker.", lambda m: m.queue),
    ("request_prefill_time_seconds", "Processing a sequence's prompt.", lambda m: m.prefill),
    ("request_decode_time_seconds", "Generating a sequence's tokens.", lambda m: m.decode),
    ("request_prompt_tokens", "Prompt tokens of a sequence.", lambda m: m.request_prompt_tokens),
    ("request_generation_tokens", "Generated tokens of a sequence.", lambda m: m.request_generation_tokens),
    ("iteration_tokens", "Tokens generated in one engine step.", lambda m: m.iteration_tokens),
    ("model_load_seconds", "From the start of a worker to its model being ready.", lambda m: m.load),
    ("model_load_wait_seconds", "A model that is asked for, until there is room for it.", lambda m: m.load_wait),
    ("model_swap_seconds", "From asking for a model to its being ready, where others had to leave.", lambda m: m.swap),
)
_COUNTERS: Final[tuple[tuple[str, str, "Callable[[ModelMetrics], int]"], ...]] = (
    ("prompt_tokens", "Prompt tokens of finished sequences.", lambda m: m.prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.", lambda m: m.prompt_tokens_cached),
    ("generation_tokens", "Tokens generated.", lambda m: m.generation_tokens),
    ("ignored_fields", "Request fields that nobody knows.", lambda m: m.ignored_fields),
    ("request_resumes", "Sequences that went on at another worker.", lambda m: m.resumes),
    ("requests_quarantined", "Requests found to kill workers.", lambda m: m.quarantined),
    ("worker_stuck", "Times that a worker's step did not end in time.", lambda m: m.stuck),
    ("worker_trims", "Times that a worker was told to do with less memory.", lambda m: m.trims),
    ("worker_recycles", "Workers started anew because their memory had grown.", lambda m: m.recycles),
)
# Counted by the worker since it started.
_WORKER_COUNTERS: Final[tuple[tuple[str, str, Callable[[Stats], int]], ...]] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.cache_query_tokens),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda s: s.cache_hit_tokens),
    ("prefix_cache_evictions", "Entries that the prefix cache gave up.", lambda s: s.cache_evictions),
    ("prefix_cache_disk_hits", "Prefixes taken from the disk.", lambda s: s.disk_hits),
    ("prefix_cache_disk_restored", "Prompt tokens read back from the disk.", lambda s: s.disk_restored_tokens),
    ("prefix_cache_disk_writes", "Files written to the disk.", lambda s: s.disk_writes),
    ("prefix_cache_disk_dropped", "Writes given up because the disk was too slow or full.", lambda s: s.disk_dropped),
    ("prefix_cache_disk_quarantined", "Files that were not what they should be.", lambda s: s.disk_quarantined),
    ("num_preemptions", "Running sequences that had to make room.", lambda s: s.preemptions),
    (
        "malformed_tool_calls",
        "Tool calls that broke: made text, closed, or finished as `length`.",
        lambda s: s.malformed_tool_calls,
    ),
)
_LABELLED: Final[tuple[tuple[str, str, str, "Callable[[ModelMetrics], dict[str, int]]"], ...]] = (
    ("request_success", "Sequences by how they ended.", "finished_reason", lambda m: m.finished),
    ("admission_rejections", "Requests turned away.", "reason", lambda m: m.rejections),
    ("model_loads", "Loads, because there was room or others had to leave.", "reason", lambda m: m.loads),
    ("model_evictions", "Models unloaded without an order.", "reason", lambda m: m.evictions),
    ("worker_restarts", "Workers that ended unasked, by exit status.", "exit", lambda m: m.restarts),
)
_MEMORY: Final = ("active", "peak", "cache", "phys_footprint", "kv", "prefix_cache", "wired_limit")


class Exposition(Collector):
    """A collector of the registry; reads `Metrics` when scraped and keeps nothing."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        return with_vllm_names(families) if self._metrics.has_vllm_names() else families

    def _families(self) -> Iterator[Metric]:
        yield from self._globals()
        models = self._metrics.models.items()
        yield self._requests()
        yield from self._keys()
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(f"mlxd_{name}", text, labels=["model"])
            for model, numbers in models:
                counter.add_metric([model], read(numbers))
            yield counter
        for name, text, read_stats in _WORKER_COUNTERS:
            counter = CounterMetricFamily(f"mlxd_{name}", text, labels=["model"])
            for model, numbers in models:
                if numbers.stats is not None:
                    counter.add_metric([model], read_stats(numbers.stats))
            yield counter
        for name, text, label, read_many in _LABELLED:
            counter = CounterMetricFamily(f"mlxd_{name}", text, labels=["model", label])
            for model, numbers in models:
                for value, count in read_many(numbers).items():
                    counter.add_metric([model, value], count)
            yield counter
        yield from _gauges(models)
        yield from memory_series(self._metrics)
        for name, text, read_histogram in _HISTOGRAMS:
            family = HistogramMetricFamily(f"mlxd_{name}", text, labels=["model"])
            for model, numbers in models:
                histogram = read_histogram(numbers)
                family.add_metric([model], histogram.cumulative(), histogram.sum)
            yield family

    def describe(self) -> Iterable[Metric]:
        # Registering must not collect.
        return []

    def _requests(self) -> Metric:
        family = CounterMetricFamily("mlxd_requests", "API requests by HTTP status.", labels=["model", "status"])
        for status, count in self._metrics.requests_without_model.items():
            family.add_metric(["unknown", status], count)
        for model, numbers in self._metrics.models.items():
            for status, count in numbers.requests.items():
                family.add_metric([model, status], count)
        return family

    def _keys(self) -> Iterator[Metric]:
        failures = CounterMetricFamily("mlxd_auth_failures", "Requests without a valid API key.", labels=["reason"])
        for reason, count in self._metrics.auth_failures.items():
            failures.add_metric([reason], count)
        requests = CounterMetricFamily("mlxd_key_requests", "API requests of a key.", labels=["key", "status"])
        rejections = CounterMetricFamily(
            "mlxd_key_rejections", "Requests that a key's limits or expiry turned away.", labels=["key", "reason"]
        )
        running = GaugeMetricFamily("mlxd_key_requests_running", "Requests of a key being served.", labels=["key"])
        prompt = CounterMetricFamily("mlxd_key_prompt_tokens", "Prompt tokens of a key.", labels=["key"])
        generation = CounterMetricFamily("mlxd_key_generation_tokens", "Tokens generated for a key.", labels=["key"])
        for key, numbers in self._metrics.keys.items():
            for status, count in numbers.requests.items():
                requests.add_metric([key, status], count)
            for reason, count in numbers.rejections.items():
                rejections.add_metric([key, reason], count)
            running.add_metric([key], numbers.running)
            prompt.add_metric([key], numbers.prompt_tokens)
            generation.add_metric([key], numbers.generation_tokens)
        yield from (failures, requests, rejections, running, prompt, generation)

    def _globals(self) -> Iterator[Metric]:
        metrics = self._metrics
        build = GaugeMetricFamily("mlxd_build_info", "The version that runs.", labels=["version"])
        build.add_metric([protocol.__version__], 1)
        yield build
        for name, text, value in (
            ("stale_messages", "Messages of old worker incarnations, dropped.", metrics.stale_messages),
            ("malformed_frames", "Frames that are no message, dropped.", metrics.malformed_frames),
            ("unhandled_errors", "Requests that failed by a fault of the gateway.", metrics.unhandled_errors),
            ("log_records_dropped", "Log lines lost because stderr or the disk did not keep up.", dropped_records()),
        ):
            yield CounterMetricFamily(f"mlxd_{name}", text, value=value)
        text, value = "Aborted sequences that their worker has not ended yet.", metrics.unacked_aborts()
        yield GaugeMetricFamily("mlxd_unacked_aborts", text, value=value)


def _gauges(models: "Iterable[tuple[str, ModelMetrics]]") -> Iterator[Metric]:
    running = GaugeMetricFamily("mlxd_num_requests_running", "Sequences being generated.", labels=["model"])
    waiting = GaugeMetricFamily("mlxd_num_requests_waiting", "Sequences waiting.", labels=["model"])
    by_reason = GaugeMetricFamily(
        "mlxd_num_requests_waiting_by_reason", "Sequences waiting for the model or in it.", labels=["model", "reason"]
    )
    state = GaugeMetricFamily("mlxd_worker_state", "1 for the state that the worker is in.", labels=["model", "state"])
    age = GaugeMetricFamily("mlxd_worker_step_age_seconds", "Age of the running step; 0 when idle.", labels=["model"])
    usage = GaugeMetricFamily("mlxd_kv_cache_usage_perc", "Share of the KV budget in use, 0 to 1.", labels=["model"])
    disk = GaugeMetricFamily(
        "mlxd_prefix_cache_disk_bytes", "Prefix cache on disk, as this worker sees it.", labels=["model"]
    )
    memory = GaugeMetricFamily("mlxd_worker_memory_bytes", "A worker's memory.", labels=["model", "kind"])
    for model, numbers in models:
        stats = numbers.stats
        queued = stats.waiting if stats else 0
        running.add_metric([model], stats.running if stats else 0)
        waiting.add_metric([model], queued + numbers.opening)
        by_reason.add_metric([model, "model"], numbers.opening)
        by_reason.add_metric([model, "capacity"], queued)
        age.add_metric([model], stats.step_age_ms / 1000 if stats else 0)
        for name in STATES:
            state.add_metric([model, name], float(numbers.state == name))
        if stats is not None:
            disk.add_metric([model], stats.disk_bytes)
            usage.add_metric([model], stats.kv_bytes / stats.kv_limit if stats.kv_limit else 0)
            for kind, value in zip(_MEMORY, _memory(stats), strict=True):
                memory.add_metric([model, kind], value)
    yield from (running, waiting, by_reason, state, age, usage, disk, memory)


def _memory(stats: Stats) -> tuple[int, ...]:
    return (
        stats.mem_active, stats.mem_peak, stats.mem_cache, stats.footprint, stats.kv_bytes, stats.cache_bytes,
        stats.wired_limit,
    )  # fmt: skip
