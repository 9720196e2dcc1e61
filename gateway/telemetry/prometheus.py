"""Prometheus exposition of `Metrics`: names, help and labels, with vLLM's suffixes and units.

Series under vLLM's names, for dashboards and scrapers made for vLLM.

Text of `/metrics`. It is rendered in steps, between which the event loop runs, and with a rate limit.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final, TypeVar

from msgspec import Struct
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

import protocol
from gateway.errors import SERVER, ApiError
from gateway.telemetry.logs import dropped_records
from gateway.telemetry.metrics import MODEL_SERIES, Histogram, KeyMetrics, Metrics, ModelMetrics, ModelSeries
from gateway.workers.supervisor.state import MemoryView
from protocol.spec import ADAPTERS_MAX
from protocol.stats import BLOCK, DraftStats, Exported, Stats, series

OURS: Final = "mlxd_"
# Maps our series to vLLM's names for series with the same meaning and unit.
NAMES: Final = {
    name: name
    for name in (
        "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
        "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions",
        "request_success", "time_to_first_token_seconds", "inter_token_latency_seconds",
        "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    )
} | {"iteration_tokens": "iteration_tokens_total"}  # fmt: skip


def with_vllm_names(families: Iterable[Metric]) -> Iterator[Metric]:
    """Yield each family, and its copy under vLLM's name if there is one."""
    for family in families:
        yield family
        theirs = NAMES.get(family.name.removeprefix(OURS))
        if theirs is not None:
            yield _renamed(family, f"vllm:{theirs}")


def lora_requests(models: Mapping[str, ModelMetrics]) -> Metric:
    """Return the adapters of running requests with the labels that routers for vLLM read. The value is the time."""
    family = Metric("vllm:lora_requests_info", "Adapters of running requests.", "gauge")
    for model, numbers in models.items():
        if numbers.adapters:
            running = ",".join(sorted(name for name, count in numbers.adapters_running.items() if count > 0))
            labels = {"model_name": model, "engine": "0", "max_lora": str(ADAPTERS_MAX)}
            labels |= {"running_lora_adapters": running, "waiting_lora_adapters": ""}
            family.samples.append(Sample(family.name, labels, time.time()))
    return family


def cache_config(models: Mapping[str, ModelMetrics]) -> Metric:
    """Return the KV capacity of loaded models in blocks, which are the unit of KV events. The value is 1.

    A model whose KV does not grow with the context has no blocks and no sample.
    """
    family = Metric("vllm:cache_config_info", "KV that a model has room for, in blocks of tokens.", "gauge")
    for model, numbers in models.items():
        stats = numbers.stats
        if stats is not None and stats.kv_blocks:
            labels = {"model_name": model, "engine": "0", "block_size": str(BLOCK)}
            labels |= {"num_gpu_blocks": str(stats.kv_blocks), "enable_prefix_caching": "True"}
            labels |= {"cache_dtype": f"int{stats.kv_bits}" if stats.kv_bits else "auto"}
            family.samples.append(Sample(family.name, labels, 1.0))
    return family


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type, family.unit)
    for sample in family.samples:
        labels = {"model_name" if key == "model" else key: value for key, value in sample.labels.items()}
        suffix = sample.name.removeprefix(family.name)
        renamed.samples.append(Sample(name + suffix, labels | {"engine": "0"}, sample.value))
    return renamed


# Samples of a family, each with its label values and its number.
Samples = Iterable[tuple[list[str], float]]
L = TypeVar("L", bound=str | tuple[str, ...])

STATES: Final = (
    "stopped", "starting", "loading", "ready", "draining", "stopping", "backoff", "failed", "incompatible",
)  # fmt: skip

CERTIFICATE_LOADS: Final = ("ok", "failed")
BATCH_OUTCOMES: Final = ("succeeded", "errored", "canceled", "expired")
STORE_PROBLEMS: Final = ("damaged", "failed", "dropped", "journal")

# Declarations of the series that workers' statistics have.
_OF_WORKERS: Final = series(Stats)
_OF_DRAFTS: Final = series(DraftStats)
_GAUGES: Final[tuple[tuple[str, str, "Callable[[ModelMetrics], float]"], ...]] = (
    ("num_requests_running", "Sequences being generated.", lambda m: m.stats.running if m.stats else 0),
    (
        "num_requests_waiting",
        "Sequences waiting for their model or in its worker's queue.",
        lambda m: m.opening + (m.stats.waiting if m.stats else 0),
    ),
    (
        "worker_step_age_seconds",
        "Age of the running step; 0 when idle.",
        lambda m: m.stats.step_age_ms / 1000 if m.stats else 0,
    ),
)


class Exposition:
    """Renderer of `/metrics`. A scrape reads the current metrics of the gateway and of its process.

    With `has_vllm_names` the series that vLLM also has are listed a second time under its names.
    """

    def __init__(self, metrics: Metrics, *, has_vllm_names: bool = False) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfMetrics(metrics, has_vllm_names))
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Render all families in Prometheus' text format."""
        return b"".join(self.families())

    def families(self) -> Iterator[bytes]:
        """Render the families one at a time."""
        for family in self._registry.collect():
            yield generate_latest(_Family(family))


class _OfMetrics(Collector):
    """Collector that reads `Metrics` at each scrape."""

    def __init__(self, metrics: Metrics, has_vllm_names: bool) -> None:
        self._metrics = metrics
        self._has_vllm_names = has_vllm_names

    def collect(self) -> Iterator[Metric]:
        families = self._families()
        if not self._has_vllm_names:
            return families
        return chain(
            with_vllm_names(families), [lora_requests(self._metrics.models), cache_config(self._metrics.models)]
        )

    def describe(self) -> Iterable[Metric]:
        # An empty description keeps the registry from collecting when this collector is registered.
        return []

    def _families(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield from _of_gateway(metrics)
        yield from _of_connections(metrics)
        yield from _of_tls(metrics)
        yield from _of_upstreams(metrics)
        yield from _of_loads(metrics)
        yield from _of_keys(metrics.keys)
        yield from metrics.gen_ai.families()
        yield from _of_models(metrics.models)
        yield from _of_workers({model: m.stats for model, m in metrics.models.items() if m.stats is not None})
        if metrics.memory_view is not None:
            yield from _of_memory(metrics.memory_view)


class _Family(Collector):
    """Collector of one family."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterable[Metric]:
        return (self._family,)


def _of_gateway(metrics: Metrics) -> Iterator[Metric]:
    yield _gauge("build_info", "Version of the running daemon.", ["version"], [([protocol.__version__], 1)])
    bodies, media = metrics.body_numbers, metrics.media_numbers
    for name, text, value in (
        ("stale_messages", "Messages of earlier worker processes, dropped.", metrics.stale_messages),
        ("malformed_frames", "Frames from workers that could not be decoded, dropped.", metrics.malformed_frames),
        ("unhandled_errors", "Requests that failed by an internal error of the gateway.", metrics.unhandled_errors),
        ("log_records_dropped", "Log lines lost because stderr or the disk did not keep up.", dropped_records()),
        ("audit_lines_lost", "Lines of the audit log that could not be written.", metrics.audit_lines_lost()),
        (
            "request_body_rejections",
            "Requests refused because other requests' bodies fill the memory for bodies.",
            bodies.refused,
        ),
        ("request_body_offloads", "Large bodies decoded or lowered in a thread, off the event loop.", bodies.offloaded),
        (
            "media_rejections",
            "Requests refused because media fill 512 MiB, or the share of their key.",
            media.refused,
        ),
    ):
        yield _counter(name, text, [], [([], value)])
    for name, text, value in (
        (
            "gpu_duty_ratio",
            "Part of the time in which workers compute; below 1 it leaves the rest to this machine's display.",
            metrics.gpu_duty_ratio(),
        ),
        ("pace_duty", "Deprecated: the same as `mlxd_gpu_duty_ratio`.", metrics.gpu_duty_ratio()),
        (
            "unacked_aborts",
            "Aborted sequences whose worker has not confirmed the end yet.",
            metrics.unacked_aborts(),
        ),
        ("request_body_bytes", "Memory held by the bodies of unfinished requests.", bodies.used_bytes),
        ("media_in_flight_bytes", "Bytes of images, video and audio of unfinished requests.", media.used_bytes),
        (
            "batch_requests_waiting",
            "Requests of batches that wait until nothing else runs.",
            metrics.batch_requests_waiting(),
        ),
        ("media_fetches", "Fetches of media by URL that run.", media.fetching),
    ):
        yield _gauge(name, text, [], [([], value)])
    outcomes = [([outcome], metrics.batch_requests[outcome]) for outcome in BATCH_OUTCOMES]
    yield _counter("batch_requests", "Requests of batches that have ended.", ["outcome"], outcomes)
    yield _counter("auth_failures", "Requests without a valid API key.", ["reason"], _samples(metrics.auth_failures))
    problems = [([reason], metrics.store_problems[reason]) for reason in STORE_PROBLEMS]
    yield _counter("response_store_problems", "Failed calls of the response store.", ["reason"], problems)
    by_model = {model: m.requests for model, m in metrics.models.items()}
    requests = _samples_by({"unknown": metrics.requests_without_model} | by_model)
    yield _counter("requests", "API requests by HTTP status.", ["model", "status"], requests)


def _of_connections(metrics: Metrics) -> Iterator[Metric]:
    count = [([listener], read()) for listener, read in metrics.connections.items()]
    yield _gauge("connections", "Open client connections.", ["listener"], count)
    limits = [([listener], read()) for listener, read in metrics.connections_max.items()]
    yield _gauge("connections_max", "Limit of open client connections.", ["listener"], limits)
    yield _gauge("websockets", "Open WebSockets of clients.", [], [([], metrics.websockets())])
    refused = _samples(metrics.connections_refused)
    yield _counter("connections_refused", "Connections refused when they were opened.", ["listener", "reason"], refused)
    text = "Connections closed because of the client: too slow, idle or invalid."
    yield _counter("connections_dropped", text, ["reason"], _samples(metrics.connections_dropped))


def _of_tls(metrics: Metrics) -> Iterator[Metric]:
    if metrics.certificate_expiry is None:
        return
    text = "Expiry of the TLS certificate, in seconds since 1970."
    yield _gauge("tls_certificate_expiry_timestamp_seconds", text, [], [([], metrics.certificate_expiry())])
    loads = [([outcome], metrics.certificate_loads[outcome]) for outcome in CERTIFICATE_LOADS]
    yield _counter("tls_certificate_loads", "Reloads of changed TLS certificate files.", ["outcome"], loads)


def _of_loads(metrics: Metrics) -> Iterator[Metric]:
    """Yield the load metrics by which a router can choose among daemons."""
    loads = list(metrics.loads())
    backlog = [([model], tokens) for model, tokens, _ in loads]
    yield _gauge(
        "prefill_backlog_tokens", "Prompt tokens of accepted sequences, not processed yet.", ["model"], backlog
    )
    waits = [([model], wait_s) for model, _, wait_s in loads]
    text = "Estimated wait of a new request before its prompt is processed, without a load."
    yield _gauge("estimated_wait_seconds", text, ["model"], waits)
    rates = [([model], m.prefill_rate) for model, m in metrics.models.items()]
    text = "Prompt tokens processed per second of a sequence's prefill, as measured lately; 0 before the first."
    yield _gauge("prefill_tokens_per_second", text, ["model"], rates)


def _of_upstreams(metrics: Metrics) -> Iterator[Metric]:
    text = "Requests that left this machine for an upstream."
    yield _counter("upstream_requests", text, ["to", "model", "outcome"], _samples(metrics.upstream_requests))


def _of_keys(keys: Mapping[str, KeyMetrics]) -> Iterator[Metric]:
    requests = _samples_by({key: k.requests for key, k in keys.items()})
    yield _counter("key_requests", "API requests of a key.", ["key", "status"], requests)
    rejections = _samples_by({key: k.rejections for key, k in keys.items()})
    yield _counter("key_rejections", "Requests refused by a key's limits or expiry.", ["key", "reason"], rejections)
    budgets = [([key, period, kind], part) for key, k in keys.items() for period, kind, part in k.budget()]
    yield _gauge("key_budget_used_ratio", "Used part of a key's budget.", ["key", "period", "kind"], budgets)
    for make, name, text, read in _KEY_FAMILIES:
        yield make(name, text, ["key"], [([key], read(k)) for key, k in keys.items()])


def _of_models(models: Mapping[str, ModelMetrics]) -> Iterator[Metric]:
    for field, declared in MODEL_SERIES.items():
        values = {model: getattr(m, field) for model, m in models.items()}
        if declared.is_histogram:
            yield _histogram(declared, values)
        elif declared.label:
            yield _counter(declared.name, declared.help, ["model", declared.label], _samples_by(values))
        else:
            yield _counter(declared.name, declared.help, ["model"], _samples(values))
    for name, text, read in _GAUGES:
        yield _gauge(name, text, ["model"], [([model], read(m)) for model, m in models.items()])
    waiting = [([model, "model"], m.opening) for model, m in models.items()]
    waiting += [([model, "capacity"], m.stats.waiting if m.stats else 0) for model, m in models.items()]
    text = "Waiting sequences: for their model to be loaded, or for capacity in its worker."
    yield _gauge("num_requests_waiting_by_reason", text, ["model", "reason"], waiting)
    states = [([model, name], float(m.state == name)) for model, m in models.items() for name in STATES]
    yield _gauge("worker_state", "State of the worker: 1 for the current one.", ["model", "state"], states)
    modes = [([model, m.batch_mode], 1) for model, m in models.items() if m.batch_mode]
    yield _gauge(
        "worker_batch_mode",
        "Batch mode of the worker: how its rows share a forward pass. 1 for the current one.",
        ["model", "batch_mode"],
        modes,
    )
    returned = [([model], m.returned_part) for model, m in models.items() if m.returned_part is not None]
    text = "Part of a worker's memory that the system had back within two seconds of the newest unload."
    yield _gauge("model_memory_returned_ratio", text, ["model"], returned)


def _of_workers(workers: Mapping[str, Stats]) -> Iterator[Metric]:
    """Yield the series that the statistics declare, and those that are computed from several statistics."""
    yield from _declared(_OF_WORKERS, ["model"], [([model], stats) for model, stats in workers.items()])
    used = [([model], stats.kv_bytes / max(stats.kv_limit, 1)) for model, stats in workers.items()]
    yield _gauge("kv_cache_usage_perc", "Share of the KV budget in use, 0 to 1.", ["model"], used)
    drafted = [([model, each.source], each) for model, stats in workers.items() for each in stats.drafted]
    yield from _declared(_OF_DRAFTS, ["model", "source"], drafted)
    places = [([*labels, str(at)], count) for labels, each in drafted for at, count in enumerate(each.by_position)]
    text = "Drafted tokens accepted, by their place in the draft."
    yield _counter("spec_decode_num_accepted_tokens_per_pos", text, ["model", "source", "position"], places)


def _declared(
    families: Iterable[list[tuple[str, Exported]]], labels: list[str], structs: Sequence[tuple[list[str], Struct]]
) -> Iterator[Metric]:
    """Yield a family for each declared series, with one sample per struct. Each struct comes with its label values."""
    for fields in families:
        declared = fields[0][1]
        kinds = ["kind"] if declared.kind else []
        samples = [
            ([*values, *([mark.kind] if mark.kind else [])], getattr(struct, name))
            for values, struct in structs
            for name, mark in fields
        ]
        make = _counter if declared.type == "counter" else _gauge
        yield make(declared.name, declared.help, [*labels, *kinds], samples)


def _of_memory(view: MemoryView) -> Iterator[Metric]:
    """Yield the memory metrics of the newest measurement, which is at most about a second old."""
    for name, text, value in (
        ("budget", "Memory budget of all models together.", view.budget_bytes),
        ("granted", "Memory granted to models, with what ended processes still hold.", view.granted_bytes),
        ("footprint", "Measured memory of all models' processes.", view.footprint_bytes),
    ):
        yield _gauge(f"memory_{name}_bytes", text, [], [([], value)])
    shares = [([model], memory.share_bytes) for model, memory in view.models.items()]
    yield _gauge("model_memory_granted_bytes", "Memory granted to a model, its part of the budget.", ["model"], shares)
    footprints = [([model], memory.footprint_bytes) for model, memory in view.models.items()]
    text = "Memory of a model's process, as measured from outside."
    yield _gauge("model_memory_footprint_bytes", text, ["model"], footprints)


def _counter(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    return _filled(CounterMetricFamily(f"mlxd_{name}", text, labels=labels), samples)


def _gauge(name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily(f"mlxd_{name}", text, labels=labels), samples)


_KEY_FAMILIES: Final[tuple[tuple[Callable[..., Metric], str, str, Callable[[KeyMetrics], int]], ...]] = (
    (_gauge, "key_requests_running", "Requests of a key being served.", lambda k: k.running),
    (_gauge, "key_sequences_running", "Sequences of a key being served.", lambda k: k.sequences),
    (_counter, "key_prompt_tokens", "Prompt tokens of a key.", lambda k: k.prompt_tokens),
    (_counter, "key_generation_tokens", "Tokens generated for a key.", lambda k: k.generation_tokens),
)


def _samples(counts: Mapping[L, int]) -> Samples:
    """Return samples of counts with one label or several."""
    return [([labels] if isinstance(labels, str) else [*labels], count) for labels, count in counts.items()]


def _samples_by(counts: Mapping[str, Mapping[str, int]]) -> Samples:
    """Return samples of counts with two labels."""
    return [([outer, inner], count) for outer, own in counts.items() for inner, count in own.items()]


def _histogram(series: ModelSeries, values: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(f"mlxd_{series.name}", series.help, labels=["model"])
    for model, histogram in values.items():
        family.add_metric([model], histogram.cumulative(), histogram.sum)
    return family


def _filled(family: CounterMetricFamily | GaugeMetricFamily, samples: Samples) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


# Renderings are limited by a token bucket: BURST at first, for several scrapers, then one per period.
BURST: Final = 5.0
PERIOD_S: Final = 1.0


class ScrapeText:
    """Renderer of `/metrics` on the event loop. One scrape renders at a time; concurrent scrapes wait.

    With many models and keys a rendering takes tens of milliseconds, so the loop runs other tasks after each family.
    """

    def __init__(
        self, metrics: Metrics, *, has_vllm_names: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._exposition = Exposition(metrics, has_vllm_names=has_vllm_names)
        self._clock = clock
        self._lock = asyncio.Lock()
        # `_text` is None after a failed rendering.
        self._text: bytes | None = None
        self._allowance = BURST
        self._at = clock()

    async def read(self) -> bytes:
        """Return the current text. When the rate limit is reached, the text may be up to `PERIOD_S` old.

        Raises the exception of a failed rendering, and then `ApiError` until the next rendering.
        """
        async with self._lock:
            now = self._clock()
            self._allowance = min(BURST, self._allowance + (now - self._at) / PERIOD_S)
            self._at = now
            if self._allowance >= 1.0:
                self._allowance -= 1.0
                try:
                    self._text = await self._render()
                except Exception:  # The exception is raised again, because an old text must not hide the failure.
                    self._text = None
                    raise
            if self._text is None:
                raise ApiError(500, "The metrics cannot be rendered; the log says why.", type=SERVER, code="internal")
            return self._text

    async def _render(self) -> bytes:
        families: list[bytes] = []
        for family in self._exposition.families():
            families.append(family)
            await asyncio.sleep(0)
        return b"".join(families)
