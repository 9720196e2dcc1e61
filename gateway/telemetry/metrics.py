"""Metrics as plain numbers, which are cheap to update. `prometheus.py` exposes them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from gateway.telemetry.histogram import BATCH_BUCKETS, ITL_BUCKETS, LATENCY_BUCKETS, TOKEN_BUCKETS, Histogram
from gateway.workers.supervisor.state import MemoryView
from protocol.from_worker import Pong, Step, Usage
from protocol.stats import Stats

# Prefill rate: sequences with fewer computed tokens are ignored, and older ones decay by this factor per sequence.
PREFILL_TOKENS_MIN: Final = 64
PREFILL_DECAY: Final = 0.8


def _latency() -> Histogram:
    return Histogram(LATENCY_BUCKETS)


def _tokens() -> Histogram:
    return Histogram(TOKEN_BUCKETS)


@dataclass(slots=True)
class ModelMetrics:
    """Metrics of one model. Updated by its requests and by events of its worker, on the event loop."""

    # Sequences that wait for the model; `stats.waiting` counts those in the worker's queue.
    opening: int = 0
    stats: Stats | None = None
    # How its rows share a forward pass; empty if unknown.
    batch_mode: str = ""
    state: str = "stopped"
    requests: Counter[str] = field(default_factory=Counter[str])
    finished: Counter[str] = field(default_factory=Counter[str])
    # Sequences by adapter, and the running ones.
    adapters: Counter[str] = field(default_factory=Counter[str])
    adapters_running: Counter[str] = field(default_factory=Counter[str])
    rejections: Counter[str] = field(default_factory=Counter[str])
    restarts: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    generation_tokens: int = 0
    ignored_fields: int = 0
    resumes: int = 0
    quarantined: int = 0
    stuck: int = 0
    ttft: Histogram = field(default_factory=_latency)
    itl: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS))
    per_token: Histogram = field(default_factory=lambda: Histogram(ITL_BUCKETS))
    e2e: Histogram = field(default_factory=_latency)
    queue: Histogram = field(default_factory=_latency)
    prefill: Histogram = field(default_factory=_latency)
    decode: Histogram = field(default_factory=_latency)
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_generation_tokens: Histogram = field(default_factory=_tokens)
    iteration_tokens: Histogram = field(default_factory=lambda: Histogram(BATCH_BUCKETS))
    load: Histogram = field(default_factory=_latency)
    load_wait: Histogram = field(default_factory=_latency)
    swap: Histogram = field(default_factory=_latency)
    loads: Counter[str] = field(default_factory=Counter[str])
    evictions: Counter[str] = field(default_factory=Counter[str])
    trims: int = 0
    recycles: int = 0
    # Decaying sums of prompt tokens processed by local workers, and the time of it.
    prefilled_tokens: float = 0.0
    prefilled_s: float = 0.0
    # Part of the process's memory that returned in time after the newest unload.
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
    def prefill_rate(self) -> float:
        """Recent prompt tokens per second; 0 if unknown."""
        return self.prefilled_tokens / self.prefilled_s if self.prefilled_s > 0 else 0.0

    def note_prefill(self, usage: Usage) -> None:
        """Update the prefill rate with a sequence that a local worker has ended."""
        computed = usage.prompt - usage.cached
        if computed < PREFILL_TOKENS_MIN or usage.prefill_ms <= 0:
            return
        self.prefilled_tokens = PREFILL_DECAY * self.prefilled_tokens + computed
        self.prefilled_s = PREFILL_DECAY * self.prefilled_s + usage.prefill_ms / 1000


@dataclass(slots=True)
class KeyMetrics:
    """Metrics of one API key, on the event loop."""

    # Requests and sequences that run.
    running: int = 0
    sequences: int = 0
    requests: Counter[str] = field(default_factory=Counter[str])
    rejections: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    generation_tokens: int = 0
    # Seconds since 1970; 0 for never.
    last_used: float = 0.0
    # Returns period, kind and used part of each of its budgets.
    budget: Callable[[], list[tuple[str, str, float]]] = list


@dataclass(slots=True)
class BodyNumbers:
    """Metrics of request bodies. Updated on the event loop."""

    used_bytes: int = 0
    # Requests refused for lack of room, and bodies processed in the thread.
    refused: int = 0
    offloaded: int = 0


@dataclass(slots=True)
class MediaNumbers:
    """Metrics of the images, video and audio of requests. Updated on the event loop."""

    used_bytes: int = 0
    # Requests refused for lack of room.
    refused: int = 0
    # Running fetches by URL.
    fetching: int = 0


class Metrics:
    """All metrics of one gateway. The pool and the link report through the `Events` methods.

    Model names are resolved, never those that clients send, so the configuration bounds the number of series. Callables
    are called when the metrics are scraped.
    """

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelMetrics] = defaultdict(ModelMetrics)
        # Metrics of API keys by the key's name, which the operator chooses.
        self.keys: defaultdict[str, KeyMetrics] = defaultdict(KeyMetrics)
        # Requests without a valid key, by reason.
        self.auth_failures: Counter[str] = Counter()
        # Requests that ended before their model was known (invalid bodies, unknown names and paths), by status.
        self.requests_without_model: Counter[str] = Counter()
        self.memory_view: MemoryView | None = None
        self.stale_messages = 0
        self.malformed_frames = 0
        self.unhandled_errors = 0
        # Failures of the response store by kind, see `prometheus.STORE_PROBLEMS`.
        self.store_problems: Counter[str] = Counter()
        # Open connections and their limit, by listener.
        self.connections: dict[str, Callable[[], int]] = {}
        self.connections_max: dict[str, Callable[[], int]] = {}
        # Connections refused at once, by listener and reason, and closed later, by reason.
        self.connections_refused: Counter[tuple[str, str]] = Counter()
        self.connections_dropped: Counter[str] = Counter()
        # Expiry of the TLS certificate in seconds since 1970, and reloads of its files by outcome.
        self.certificate_expiry: Callable[[], float] | None = None
        self.certificate_loads: Counter[str] = Counter()
        self.body_numbers = BodyNumbers()
        self.media_numbers = MediaNumbers()
        # Called with model and state at once, for the page's feed.
        self.on_state: Callable[[str, str], None] | None = None
        # Requests sent to peers by peer and reason, and sequences lost by peer.
        self.forwarded: Counter[tuple[str, str]] = Counter()
        self.reroutes: Counter[str] = Counter()
        # Requests sent to upstreams, by upstream, model and status or failure.
        self.upstream_requests: Counter[tuple[str, str, str]] = Counter()
        # Returns name, availability and failures by reason of each peer.
        self.peers: Callable[[], Iterable[tuple[str, bool, dict[str, int]]]] = tuple
        # Returns name, waiting prompt tokens and estimated wait in seconds of each local model.
        self.loads: Callable[[], Iterable[tuple[str, int, float]]] = tuple
        self.pace_duty: Callable[[], float] = lambda: 1.0
        self.unacked_aborts: Callable[[], int] = int
        self.audit_lines_lost: Callable[[], int] = int
        self.has_vllm_names: Callable[[], bool] = bool

    def model(self, name: str) -> ModelMetrics:
        """Metrics of a model, by its resolved name."""
        return self.models[name]

    def key(self, name: str) -> KeyMetrics:
        """Metrics of an API key, by its name."""
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
        """Count an exit; status 0 is an ordered stop."""
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
        self.model(model).load.observe(s)

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

    def request_quarantined(self, model: str) -> None:
        self.model(model).quarantined += 1

    def memory_granted(self, model: str, wait_s: float, reason: str) -> None:
        """Count a grant; `reason` is `room`, or `swap` if other models were evicted for it."""
        numbers = self.model(model)
        numbers.loads[reason] += 1
        numbers.load_wait.observe(wait_s)

    def model_swapped_in(self, model: str, s: float) -> None:
        """Record the time from request to Ready of a model for which others were evicted."""
        self.model(model).swap.observe(s)

    def model_evicted(self, model: str, reason: str) -> None:
        self.model(model).evictions[reason] += 1

    def memory_returned(self, model: str, part: float) -> None:
        """Record the part of an ended process's memory that came back in time."""
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
