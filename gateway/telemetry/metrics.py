"""Metrics as plain numbers, which are cheap to update. `prometheus.py` exposes them.

Histogram. An observation costs a bisection and two additions; `prometheus.py` exposes the counts.

OpenTelemetry's metrics of servers of generative AI, with Prometheus' names and the conventions' own buckets.

https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/#generative-ai-model-server-metrics
"""

# ruff: noqa: RUF009 - the calls in `ModelMetrics` return dataclass fields
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric

from gateway.workers.supervisor.state import MemoryView
from protocol.from_worker import Pong, Step, Usage
from protocol.stats import Stats

# Bounds in seconds, from one decode step on a fast machine to a load of a model from a cold disk.
LATENCY_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip
ITL_BUCKETS: Final = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0,
)  # fmt: skip
TOKEN_BUCKETS: Final = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
BATCH_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Histogram:
    """Counts of observations by inclusive upper bound. Used on the event loop only."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Return pairs of `le` and the number of observations up to it. The last pair is for +Inf."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound is None else repr(float(bound)), total))
        return buckets


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


# The prefill rate ignores sequences with fewer computed tokens than PREFILL_TOKENS_MIN. With each new sequence, the
# weight of older ones is multiplied by PREFILL_DECAY.
PREFILL_TOKENS_MIN: Final = 64
PREFILL_DECAY: Final = 0.8


@dataclass(frozen=True, slots=True)
class ModelSeries:
    """Describes a field of `ModelMetrics` as a series: a histogram, a counter by `label`, or a plain counter."""

    name: str
    help: str
    label: str = ""
    is_histogram: bool = False


def _count(name: str, text: str) -> int:
    return field(default=0, metadata={"series": ModelSeries(name, text)})


def _counts(name: str, label: str, text: str) -> Counter[str]:
    return field(default_factory=Counter[str], metadata={"series": ModelSeries(name, text, label)})


def _histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
    series = ModelSeries(name, text, is_histogram=True)
    return field(default_factory=lambda: Histogram(buckets), metadata={"series": series})


@dataclass(slots=True)
class ModelMetrics:
    """Metrics of one model. The model's requests and its worker's events update them on the event loop."""

    # Number of sequences that wait for the model. `stats.waiting` counts those in the worker's queue.
    opening: int = 0
    stats: Stats | None = None
    # Batch mode of the worker, which is how rows share a forward pass; empty if unknown.
    batch_mode: str = ""
    # Reason for which the model was unloaded automatically since its newest load, or empty.
    newest_eviction: str = ""
    state: str = "stopped"
    requests: Counter[str] = field(default_factory=Counter[str])
    adapters_running: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = _count("prompt_tokens", "Prompt tokens of finished sequences.")
    prompt_tokens_cached: int = _count("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
    generation_tokens: int = _count("generation_tokens", "Tokens generated.")
    ignored_fields: int = _count("ignored_fields", "Unknown fields of requests, ignored.")
    resumes: int = _count("request_resumes", "Sequences resumed on another worker after theirs was lost.")
    next_turns: int = _count("next_turns", "Next turns of chats given to the worker to prefill while it is idle.")
    quarantined: int = _count("requests_quarantined", "Requests quarantined because they crash workers.")
    stuck: int = _count(
        "worker_stuck", "Workers ended because a step or the answer to a heartbeat exceeded its deadline."
    )
    trims: int = _count("worker_trims", "Commands to a worker to use less memory.")
    recycles: int = _count("worker_recycles", "Workers restarted because their memory had grown.")
    finished: Counter[str] = _counts("request_success", "finished_reason", "Finished sequences by finish reason.")
    adapters: Counter[str] = _counts("adapter_requests", "adapter", "Sequences that name an adapter, by adapter.")
    rejections: Counter[str] = _counts(
        "admission_rejections",
        "reason",
        "Requests refused at admission; `unsendable`: larger than a frame to a worker.",
    )
    loads: Counter[str] = _counts(
        "model_loads", "reason", "Loads of models: into free memory, or after others were unloaded for them."
    )
    evictions: Counter[str] = _counts("model_evictions", "reason", "Models unloaded automatically (memory or TTL).")
    restarts: Counter[str] = _counts("worker_restarts", "exit", "Workers that ended unexpectedly, by exit status.")
    ttft: Histogram = _histogram("time_to_first_token_seconds", "Time from a request's arrival to its first token.")
    itl: Histogram = _histogram(
        "inter_token_latency_seconds",
        "Time between two tokens of a sequence, as the gateway receives them.",
        ITL_BUCKETS,
    )
    per_token: Histogram = _histogram(
        "request_time_per_output_token_seconds", "Mean decode time per token of a sequence.", ITL_BUCKETS
    )
    e2e: Histogram = _histogram("e2e_request_latency_seconds", "Time from a request's arrival to its end.")
    queue: Histogram = _histogram("request_queue_time_seconds", "Time that a sequence waits in the worker's queue.")
    prefill: Histogram = _histogram("request_prefill_time_seconds", "Time to process a sequence's prompt.")
    decode: Histogram = _histogram("request_decode_time_seconds", "Time to generate a sequence's tokens.")
    request_prompt_tokens: Histogram = _histogram(
        "request_prompt_tokens", "Prompt tokens of a sequence.", TOKEN_BUCKETS
    )
    request_generation_tokens: Histogram = _histogram(
        "request_generation_tokens", "Generated tokens of a sequence.", TOKEN_BUCKETS
    )
    iteration_tokens: Histogram = _histogram("iteration_tokens", "Tokens generated in one engine step.", BATCH_BUCKETS)
    load: Histogram = _histogram("model_load_seconds", "Time from a worker's start until its model is ready.")
    load_wait: Histogram = _histogram(
        "model_load_wait_seconds", "Time that a requested model waits for memory to be granted."
    )
    swap: Histogram = _histogram(
        "model_swap_seconds",
        "Time from the request for a model until it is ready, where others were unloaded for it.",
    )
    # Decaying sums of the prompt tokens that local workers processed, and of the time that this took.
    prefilled_tokens: float = 0.0
    prefilled_s: float = 0.0
    # Fraction of the process's memory that was free again before a deadline, at the newest unload.
    returned_part: float | None = None

    def sequence_ended(self, reason: str, usage: Usage | None) -> None:
        """Count a sequence that has ended."""
        self.finished[reason] += 1
        if usage is None:
            return
        self.prompt_tokens += usage.prompt
        self.prompt_tokens_cached += usage.cached
        self.queue.observe(usage.queue_ms / 1000)
        self.prefill.observe(usage.prefill_ms / 1000)
        self.decode.observe(usage.decode_ms / 1000)
        self.request_prompt_tokens.observe(usage.prompt)
        self.request_generation_tokens.observe(usage.completion)
        if usage.completion > 1:
            self.per_token.observe(usage.decode_ms / 1000 / (usage.completion - 1))

    @property
    def prompt_tokens_computed(self) -> int:
        """Prompt tokens of finished sequences without those from the prefix cache, which took no time."""
        return self.prompt_tokens - self.prompt_tokens_cached

    @property
    def prefill_rate(self) -> float:
        """Recent prompt tokens per second; 0 if unknown."""
        return self.prefilled_tokens / self.prefilled_s if self.prefilled_s > 0 else 0.0

    def note_prefill(self, usage: Usage) -> None:
        """Update the prefill rate with the usage of a sequence that has ended on a local worker."""
        computed = usage.prompt - usage.cached
        if computed < PREFILL_TOKENS_MIN or usage.prefill_ms <= 0:
            return
        self.prefilled_tokens = PREFILL_DECAY * self.prefilled_tokens + computed
        self.prefilled_s = PREFILL_DECAY * self.prefilled_s + usage.prefill_ms / 1000


# Maps the names of fields of `ModelMetrics` to their series.
MODEL_SERIES: Final[dict[str, ModelSeries]] = {
    each.name: each.metadata["series"] for each in fields(ModelMetrics) if "series" in each.metadata
}


@dataclass(slots=True)
class KeyMetrics:
    """Metrics of one API key. Updated on the event loop."""

    # Numbers of running requests and sequences.
    running: int = 0
    sequences: int = 0
    requests: Counter[str] = field(default_factory=Counter[str])
    rejections: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    generation_tokens: int = 0
    # Unix time of the last use; 0 if the key was never used.
    last_used: float = 0.0
    # Returns the period, the kind and the used fraction of each of the key's budgets.
    budget: Callable[[], list[tuple[str, str, float]]] = list


@dataclass(slots=True)
class BodyNumbers:
    """Metrics of request bodies. Updated on the event loop."""

    used_bytes: int = 0
    # Number of requests refused for lack of memory, and of bodies processed in a thread instead of on the event loop.
    refused: int = 0
    offloaded: int = 0


@dataclass(slots=True)
class MediaNumbers:
    """Metrics of the images, video and audio of requests. Updated on the event loop."""

    used_bytes: int = 0
    # Number of requests that were refused for lack of memory.
    refused: int = 0
    # Number of media URLs that are being fetched.
    fetching: int = 0


class Metrics:
    """All metrics of one gateway. The pool and the link report through the `Events` methods.

    Series are labelled with resolved model names, never with names that clients send, so the configuration bounds their
    number. Fields that are callables are called when the metrics are scraped.
    """

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelMetrics] = defaultdict(ModelMetrics)
        # Metrics of API keys by the key's name, which the operator chooses.
        self.keys: defaultdict[str, KeyMetrics] = defaultdict(KeyMetrics)
        # Requests without a valid key, by reason.
        self.auth_failures: Counter[str] = Counter()
        # Number of requests that ended before their model was known, because of an invalid body, name or path, by
        # status.
        self.requests_without_model: Counter[str] = Counter()
        self.memory_view: MemoryView | None = None
        self.stale_messages = 0
        self.malformed_frames = 0
        self.unhandled_errors = 0
        # Number of failures of the response store by kind; see `prometheus.STORE_PROBLEMS`.
        self.store_problems: Counter[str] = Counter()
        # Number of open connections and their limit, for each listener.
        self.connections: dict[str, Callable[[], int]] = {}
        self.connections_max: dict[str, Callable[[], int]] = {}
        self.websockets: Callable[[], int] = lambda: 0
        # Connections refused immediately, by listener and reason, and connections closed later, by reason.
        self.connections_refused: Counter[tuple[str, str]] = Counter()
        self.connections_dropped: Counter[str] = Counter()
        # Unix time at which the TLS certificate expires, and reloads of its files by outcome.
        self.certificate_expiry: Callable[[], float] | None = None
        self.certificate_loads: Counter[str] = Counter()
        self.body_numbers = BodyNumbers()
        self.media_numbers = MediaNumbers()
        # Called with the model and its new state immediately, for the web page's feed.
        self.on_state: Callable[[str, str], None] | None = None
        self.gen_ai = GenAiMetrics()
        # Requests sent to upstreams, by upstream, model and status or failure.
        self.upstream_requests: Counter[tuple[str, str, str]] = Counter()
        # Returns, for each local model, its name, its waiting prompt tokens and its estimated wait in seconds.
        self.loads: Callable[[], Iterable[tuple[str, int, float]]] = tuple
        # Requests of batches that have ended, by outcome, and the number of those that wait to be run.
        self.batch_requests: Counter[str] = Counter()
        self.batch_requests_waiting: Callable[[], int] = int
        self.gpu_duty_ratio: Callable[[], float] = lambda: 1.0
        self.unacked_aborts: Callable[[], int] = int
        self.audit_lines_lost: Callable[[], int] = int

    def model(self, name: str) -> ModelMetrics:
        """Return the metrics of a model by its resolved name."""
        return self.models[name]

    def key(self, name: str) -> KeyMetrics:
        """Return the metrics of an API key by its name."""
        return self.keys[name]

    def declare(self, names: Iterable[str]) -> None:
        """Create the series of these models, so that they exist before the first request."""
        for name in names:
            self.model(name)

    # -- events of the pool and the link -----------------------------------------------------------------------------

    def step(self, model: str, step: Step) -> None:
        numbers = self.model(model)
        tokens = 0
        for delta in step.deltas:
            tokens += len(delta.token_ids)
        if tokens:
            numbers.generation_tokens += tokens
            numbers.iteration_tokens.observe(tokens)
        if step.stats is not None:
            numbers.stats = step.stats

    def pong(self, model: str, pong: Pong) -> None:
        self.model(model).stats = pong.stats

    def worker_exit(self, model: str, status: int) -> None:
        """Count a worker's exit. Status 0 means that its stop was ordered."""
        if status != 0:
            self.model(model).restarts[str(status)] += 1

    def state(self, model: str, state: str) -> None:
        numbers = self.model(model)
        numbers.state = str(state)
        if self.on_state is not None:
            self.on_state(model, numbers.state)
        if state not in ("ready", "draining"):
            numbers.stats, numbers.batch_mode = None, ""

    def load_seconds(self, model: str, s: float) -> None:
        """Record the time of a load, from spawn to Ready."""
        numbers = self.model(model)
        numbers.load.observe(s)
        numbers.newest_eviction = ""

    def batch_mode(self, model: str, mode: str) -> None:
        """Record the batch mode of a worker that is ready."""
        self.model(model).batch_mode = mode

    def stale_message(self) -> None:
        self.stale_messages += 1

    def malformed_frame(self) -> None:
        self.malformed_frames += 1

    def worker_stuck(self, model: str) -> None:
        self.model(model).stuck += 1

    def sequences_resumed(self, model: str, sequences: int) -> None:
        self.model(model).resumes += sequences

    def model_removed(self, model: str) -> None:
        """Remove the series of a model that was removed from the configuration and has stopped."""
        self.models.pop(model, None)
        self.gen_ai.forget(model)

    def request_quarantined(self, model: str) -> None:
        self.model(model).quarantined += 1

    def memory_granted(self, model: str, wait_s: float, reason: str) -> None:
        """Count a memory grant. `reason` is `room`, or `swap` if other models were evicted for it."""
        numbers = self.model(model)
        numbers.loads[reason] += 1
        numbers.load_wait.observe(wait_s)

    def model_swapped_in(self, model: str, s: float) -> None:
        """Record how long a model took from the request to Ready when others were evicted for it."""
        self.model(model).swap.observe(s)

    def model_evicted(self, model: str, reason: str) -> None:
        numbers = self.model(model)
        numbers.evictions[reason] += 1
        numbers.newest_eviction = reason

    def memory_returned(self, model: str, part: float) -> None:
        """Record the fraction of an ended process's memory that was free again before the deadline."""
        self.model(model).returned_part = part

    def memory_trimmed(self, model: str) -> None:
        self.model(model).trims += 1

    def memory_refused(self, model: str) -> None:
        self.rejected(model, "memory")

    def worker_recycled(self, model: str) -> None:
        self.model(model).recycles += 1

    def memory(self, view: MemoryView) -> None:
        self.memory_view = view

    # -- requests ----------------------------------------------------------------------------------------------------

    def unhandled_error(self) -> None:
        self.unhandled_errors += 1

    def request_ended(self, model: str | None, key: str | None, status: int) -> None:
        """Count an HTTP request of an API."""
        counter = self.requests_without_model if model is None else self.model(model).requests
        counter[str(status)] += 1
        if key is not None:
            self.key(key).requests[str(status)] += 1

    def rejected(self, model: str, reason: str) -> None:
        """Count a request that admission refused."""
        self.model(model).rejections[reason] += 1
