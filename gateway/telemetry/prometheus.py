"""Prometheus' view of `Metrics`: names, help and labels. vLLM's suffixes and units under `mlxd_`."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import protocol
from gateway.telemetry.histogram import Histogram
from gateway.telemetry.logs import dropped_records
from gateway.telemetry.vllm_names import with_vllm_names
from protocol.stats import Stats

if TYPE_CHECKING:
    from gateway.supervisor.state import MemoryView
    from gateway.telemetry.metrics import KeyMetrics, Metrics, ModelMetrics

# The values of a family's labels, and the number.
Samples = Iterable[tuple[list[str], float]]

STATES: Final = (
    "stopped", "starting", "loading", "ready", "draining", "stopping", "backoff", "failed", "incompatible",
)  # fmt: skip

CERTIFICATE_LOADS: Final = ("ok", "failed")
STORE_PROBLEMS: Final = ("damaged", "failed", "dropped")

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
    ("worker_stuck", "Workers ended because a step did not end in time or pings had no answer.", lambda m: m.stuck),
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
    (
        "prefix_cache_disk_quarantined",
        "Files set aside: corrupt, truncated, foreign or stale.",
        lambda s: s.disk_quarantined,
    ),
    ("num_preemptions", "Running sequences that had to make room.", lambda s: s.preemptions),
    (
        "malformed_tool_calls",
        "Tool calls that broke: made text, closed, or finished as `length`.",
        lambda s: s.malformed_tool_calls,
    ),
    (
        "worker_repaired_messages",
        "Messages of workers that could not be sent as they were: not Unicode, or too large.",
        lambda s: s.repaired_messages,
    ),
    (
        "worker_refused_questions",
        "Requests to count or decode tokens that found too many of them waiting.",
        lambda s: s.refused_questions,
    ),
    (
        "worker_allocation_failures",
        "Steps that found no memory; each halves the KV of running requests for a while.",
        lambda s: s.allocation_failures,
    ),
)
_LABELLED: Final[tuple[tuple[str, str, str, "Callable[[ModelMetrics], dict[str, int]]"], ...]] = (
    ("request_success", "Sequences by how they ended.", "finished_reason", lambda m: m.finished),
    (
        "admission_rejections",
        "Requests turned away; `unsendable`: larger than a frame to a worker.",
        "reason",
        lambda m: m.rejections,
    ),
    ("model_loads", "Loads, because there was room or others had to leave.", "reason", lambda m: m.loads),
    ("model_evictions", "Models unloaded without an order.", "reason", lambda m: m.evictions),
    ("worker_restarts", "Workers that ended unasked, by exit status.", "exit", lambda m: m.restarts),
)
_GAUGES: Final[tuple[tuple[str, str, "Callable[[ModelMetrics], float]"], ...]] = (
    ("num_requests_running", "Sequences being generated.", lambda m: m.stats.running if m.stats else 0),
    ("num_requests_waiting", "Sequences waiting.", lambda m: m.opening + (m.stats.waiting if m.stats else 0)),
    (
        "worker_step_age_seconds",
        "Age of the running step; 0 when idle.",
        lambda m: m.stats.step_age_ms / 1000 if m.stats else 0,
    ),
)
_WORKER_GAUGES: Final[tuple[tuple[str, str, Callable[[Stats], float]], ...]] = (
    ("kv_cache_usage_perc", "Share of the KV budget in use, 0 to 1.", lambda s: s.kv_bytes / max(s.kv_limit, 1)),
    ("prefix_cache_disk_bytes", "Prefix cache on disk, as this worker sees it.", lambda s: s.disk_bytes),
)
_WORKER_MEMORY: Final[tuple[tuple[str, Callable[[Stats], int]], ...]] = (
    ("active", lambda s: s.mem_active),
    ("peak", lambda s: s.mem_peak),
    ("cache", lambda s: s.mem_cache),
    ("phys_footprint", lambda s: s.footprint),
    ("kv", lambda s: s.kv_bytes),
    ("prefix_cache", lambda s: s.cache_bytes),
    ("limit", lambda s: s.mem_limit),
    ("wired_limit", lambda s: s.wired_limit),
)


class Exposition(Collector):
    """A collector of the registry; reads `Metrics` when scraped and keeps nothing."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        return with_vllm_names(families) if self._metrics.has_vllm_names() else families

    def describe(self) -> Iterable[Metric]:
        # Registering must not collect.
        return []

    def _families(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield from _of_gateway(metrics)
        yield from _of_connections(metrics)
        yield from _of_tls(metrics)
        yield from _of_keys(metrics.keys)
        yield from _of_models(metrics.models)
        yield from _of_workers({model: m.stats for model, m in metrics.models.items() if m.stats is not None})
        if metrics.memory_view is not None:
            yield from _of_memory(metrics.memory_view)
        for name, text, read in _HISTOGRAMS:
            family = HistogramMetricFamily(f"mlxd_{name}", text, labels=["model"])
            for model, m in metrics.models.items():
                histogram = read(m)
                family.add_metric([model], histogram.cumulative(), histogram.sum)
            yield family


def _of_gateway(metrics: "Metrics") -> Iterator[Metric]:
    yield _gauge("build_info", "The version that runs.", ["version"], [([protocol.__version__], 1)])
    for name, text, value in (
        ("stale_messages", "Messages of old worker incarnations, dropped.", metrics.stale_messages),
        ("malformed_frames", "Frames that are no message, dropped.", metrics.malformed_frames),
        ("unhandled_errors", "Requests that failed by a fault of the gateway.", metrics.unhandled_errors),
        ("log_records_dropped", "Log lines lost because stderr or the disk did not keep up.", dropped_records()),
        ("audit_lines_lost", "Lines that could not be written to the audit log.", metrics.audit_lines_lost()),
    ):
        yield _counter(name, text, [], [([], value)])
    unacked = metrics.unacked_aborts()
    yield _gauge("unacked_aborts", "Aborted sequences that their worker has not ended yet.", [], [([], unacked)])
    failures = [([reason], count) for reason, count in metrics.auth_failures.items()]
    yield _counter("auth_failures", "Requests without a valid API key.", ["reason"], failures)
    bodies = metrics.body_numbers
    yield _gauge("request_body_bytes", "Bodies of requests that have not ended.", [], [([], bodies.used_bytes)])
    text = "Requests turned away because the bodies of others fill their memory."
    yield _counter("request_body_rejections", text, [], [([], bodies.refused)])
    text = "Large bodies decoded or lowered beside the event loop."
    yield _counter("request_body_offloads", text, [], [([], bodies.offloaded)])
    problems = [([reason], metrics.store_problems[reason]) for reason in STORE_PROBLEMS]
    yield _counter("response_store_problems", "Calls of the store of responses that failed.", ["reason"], problems)
    requests = [(["unknown", status], count) for status, count in metrics.requests_without_model.items()]
    requests += [
        ([model, status], count) for model, m in metrics.models.items() for status, count in m.requests.items()
    ]
    yield _counter("requests", "API requests by HTTP status.", ["model", "status"], requests)


def _of_connections(metrics: "Metrics") -> Iterator[Metric]:
    count = [([listener], read()) for listener, read in metrics.connections.items()]
    yield _gauge("connections", "Open connections of clients.", ["listener"], count)
    most = [([listener], read()) for listener, read in metrics.connections_max.items()]
    yield _gauge("connections_max", "How many there may be.", ["listener"], most)
    refused = [([*labels], count) for labels, count in metrics.connections_refused.items()]
    yield _counter("connections_refused", "Connections turned away at once.", ["listener", "reason"], refused)
    dropped = [([reason], count) for reason, count in metrics.connections_dropped.items()]
    yield _counter("connections_dropped", "Connections ended for what the client did or did not.", ["reason"], dropped)


def _of_tls(metrics: "Metrics") -> Iterator[Metric]:
    if metrics.certificate_expiry is None:
        return
    text = "When the TLS certificate expires, in seconds since 1970."
    yield _gauge("tls_certificate_expiry_timestamp_seconds", text, [], [([], metrics.certificate_expiry())])
    loads = [([outcome], metrics.certificate_loads[outcome]) for outcome in CERTIFICATE_LOADS]
    yield _counter("tls_certificate_loads", "Changed files of the TLS certificate.", ["outcome"], loads)


def _of_keys(keys: "Mapping[str, KeyMetrics]") -> Iterator[Metric]:
    requests = [([key, status], count) for key, k in keys.items() for status, count in k.requests.items()]
    yield _counter("key_requests", "API requests of a key.", ["key", "status"], requests)
    rejections = [([key, reason], count) for key, k in keys.items() for reason, count in k.rejections.items()]
    text = "Requests that a key's limits or expiry turned away."
    yield _counter("key_rejections", text, ["key", "reason"], rejections)
    running = [([key], k.running) for key, k in keys.items()]
    yield _gauge("key_requests_running", "Requests of a key being served.", ["key"], running)
    sequences = [([key], k.sequences) for key, k in keys.items()]
    yield _gauge("key_sequences_running", "Sequences of a key being served.", ["key"], sequences)
    budgets = [([key, period, kind], part) for key, k in keys.items() for period, kind, part in k.budget()]
    yield _gauge("key_budget_used_ratio", "The used part of a key's budget.", ["key", "period", "kind"], budgets)
    prompt = [([key], k.prompt_tokens) for key, k in keys.items()]
    yield _counter("key_prompt_tokens", "Prompt tokens of a key.", ["key"], prompt)
    generated = [([key], k.generation_tokens) for key, k in keys.items()]
    yield _counter("key_generation_tokens", "Tokens generated for a key.", ["key"], generated)


def _of_models(models: "Mapping[str, ModelMetrics]") -> Iterator[Metric]:
    for name, text, read in _COUNTERS:
        yield _counter(name, text, ["model"], [([model], read(m)) for model, m in models.items()])
    for name, text, label, read_many in _LABELLED:
        counts = [([model, value], n) for model, m in models.items() for value, n in read_many(m).items()]
        yield _counter(name, text, ["model", label], counts)
    for name, text, read_gauge in _GAUGES:
        yield _gauge(name, text, ["model"], [([model], read_gauge(m)) for model, m in models.items()])
    waiting = [([model, "model"], m.opening) for model, m in models.items()]
    waiting += [([model, "capacity"], m.stats.waiting if m.stats else 0) for model, m in models.items()]
    text = "Sequences waiting for the model or in it."
    yield _gauge("num_requests_waiting_by_reason", text, ["model", "reason"], waiting)
    states = [([model, name], float(m.state == name)) for model, m in models.items() for name in STATES]
    yield _gauge("worker_state", "1 for the state that the worker is in.", ["model", "state"], states)
    lanes = [([model, m.lane], 1) for model, m in models.items() if m.lane]
    yield _gauge("worker_lane", "1 for how the worker's rows share a forward pass.", ["model", "lane"], lanes)
    returned = [([model], m.returned_part) for model, m in models.items() if m.returned_part is not None]
    text = "The part of a process's memory that the system had back within two seconds of its newest unload."
    yield _gauge("model_memory_returned_ratio", text, ["model"], returned)


def _of_workers(workers: Mapping[str, Stats]) -> Iterator[Metric]:
    for name, text, read in _WORKER_COUNTERS:
        yield _counter(name, text, ["model"], [([model], read(stats)) for model, stats in workers.items()])
    for name, text, read_gauge in _WORKER_GAUGES:
        yield _gauge(name, text, ["model"], [([model], read_gauge(stats)) for model, stats in workers.items()])
    memory = [([model, kind], read(stats)) for model, stats in workers.items() for kind, read in _WORKER_MEMORY]
    yield _gauge("worker_memory_bytes", "A worker's memory.", ["model", "kind"], memory)


def _of_memory(view: "MemoryView") -> Iterator[Metric]:
    """As of the broker's newest look, about a second ago at most."""
    for name, text, value in (
        ("budget", "What all models may take together.", view.budget_bytes),
        ("granted", "What is granted to models, with what ended processes still hold.", view.granted_bytes),
        ("footprint", "What the processes of all models hold, as measured.", view.footprint_bytes),
    ):
        yield _gauge(f"memory_{name}_bytes", text, [], [([], value)])
    shares = [([model], memory.share_bytes) for model, memory in view.models.items()]
    yield _gauge("model_memory_granted_bytes", "A model's share of the budget.", ["model"], shares)
    footprints = [([model], memory.footprint_bytes) for model, memory in view.models.items()]
    text = "What a model's process holds, as measured from outside."
    yield _gauge("model_memory_footprint_bytes", text, ["model"], footprints)


def _counter(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"mlxd_{name}", text, labels=labels), samples)


def _gauge(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"mlxd_{name}", text, labels=labels), samples)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
