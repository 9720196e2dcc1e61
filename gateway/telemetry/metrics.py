"""Metrics as plain numbers that cost nothing to add to. `prometheus.py` turns them into Prometheus series."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from gateway.telemetry.histogram import BATCH_BUCKETS, ITL_BUCKETS, LATENCY_BUCKETS, TOKEN_BUCKETS, Histogram
from gateway.workers.supervisor.state import MemoryView
from protocol.from_worker import Pong, Step, Usage
from protocol.stats import Stats

# Prefill of fewer tokens is not measured; of the sum before the newest one so much is kept.
PREFILL_TOKENS_MIN: Final = 64
PREFILL_KEPT: Final = 0.8


def _latency() -> Histogram:
    return Histogram(LATENCY_BUCKETS)


def _tokens() -> Histogram:
    return Histogram(TOKEN_BUCKETS)


@dataclass(slots=True)
class ModelMetrics:
    """One model's numbers. Written by its requests and by the events of its worker, all on the event loop."""

    # Requests that wait for the model itself; the worker counts those that wait inside it.
    opening: int = 0
    stats: Stats | None = None
    # How its rows share a forward pass; empty while that is not known.
    batch_mode: str = ""
    state: str = "stopped"
    requests: Counter[str] = field(default_factory=Counter[str])
    finished: Counter[str] = field(default_factory=Counter[str])
    # Sequences by the adapter that they name.
    adapters: Counter[str] = field(default_factory=Counter[str])
    # Of these, the ones that have not ended.
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
    # Prompt tokens processed here and the seconds of it, the newest sequences counting most.
    prefilled_tokens: float = 0.0
    prefilled_s: float = 0.0
    # Of the newest unload: the part of the process's memory that the system had back in time.
    returned_part: float | None = None

    def sequence_ended(self, reason: str, usage: Usage | None) -> None:
        """One sequence had its terminal event."""
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
        """Prompt tokens a second, as processed lately; 0 while that is not known."""
        return self.prefilled_tokens / self.prefilled_s if self.prefilled_s > 0 else 0.0

    def note_prefill(self, usage: Usage) -> None:
        """One sequence of this daemon's own worker has ended."""
        # What little is left of a cached prompt says nothing about speed.
        computed = usage.prompt - usage.cached
        if computed < PREFILL_TOKENS_MIN or usage.prefill_ms <= 0:
            return
        self.prefilled_tokens = PREFILL_KEPT * self.prefilled_tokens + computed
        self.prefilled_s = PREFILL_KEPT * self.prefilled_s + usage.prefill_ms / 1000


@dataclass(slots=True)
class KeyMetrics:
    """One API key's numbers, all on the event loop."""

    running: int = 0
    # Of those that run.
    sequences: int = 0
    requests: Counter[str] = field(default_factory=Counter[str])
    rejections: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    generation_tokens: int = 0
    # Seconds since 1970; 0 is never.
    last_used: float = 0.0
    # The period, the kind and the used part of each of its budgets; read when scraped.
    budget: Callable[[], list[tuple[str, str, float]]] = list


@dataclass(slots=True)
class BodyNumbers:
    """Counters of request bodies. Written on the event loop."""

    used_bytes: int = 0
    # Requests that found no room in time, and actions that were carried out in the thread.
    refused: int = 0
    offloaded: int = 0


@dataclass(slots=True)
class MediaNumbers:
    """Counters of the images, video and audio of requests. Written on the event loop."""

    used_bytes: int = 0
    # Requests that found no room for theirs.
    refused: int = 0
    # Fetches by URL that run.
    fetching: int = 0


class Metrics:
    """Every number of one gateway. What the pool and the link report arrives through the `Events` methods.

    Models are resolved names, never what a client wrote, so the number of series is bounded by the configuration.
    """

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelMetrics] = defaultdict(ModelMetrics)
        # By the key's name, which only the operator chooses.
        self.keys: defaultdict[str, KeyMetrics] = defaultdict(KeyMetrics)
        # Requests that showed no valid key, by what was wrong.
        self.auth_failures: Counter[str] = Counter()
        # Requests that ended before they had a model: bad bodies, unknown names and paths.
        self.requests_without_model: Counter[str] = Counter()
        self.memory_view: MemoryView | None = None
        self.stale_messages = 0
        self.malformed_frames = 0
        self.unhandled_errors = 0
        # Of the store of responses: `damaged`, `failed` or `dropped`.
        self.store_problems: Counter[str] = Counter()
        # By listener; read when scraped, and what is the most.
        self.connections: dict[str, Callable[[], int]] = {}
        self.connections_max: dict[str, Callable[[], int]] = {}
        # Turned away at once, by listener and reason, and ended by us, by reason.
        self.connections_refused: Counter[tuple[str, str]] = Counter()
        self.connections_dropped: Counter[str] = Counter()
        # Of the TLS certificate: until when it is valid (seconds since 1970), and what became of new files.
        self.certificate_expiry: Callable[[], float] | None = None
        self.certificate_loads: Counter[str] = Counter()
        self.body_numbers = BodyNumbers()
        self.media_numbers = MediaNumbers()
        # Told at once of a model's state, while somebody watches.
        self.on_state: Callable[[str, str], None] | None = None
        # Requests sent to peers, by peer and reason, and sequences that lost theirs.
        self.forwarded: Counter[tuple[str, str]] = Counter()
        self.reroutes: Counter[str] = Counter()
        # Requests that left for an upstream, by upstream, model and status or failure.
        self.upstream_requests: Counter[tuple[str, str, str]] = Counter()
        # Name, whether it is up, and its failures by reason, of each peer.
        self.peers: Callable[[], Iterable[tuple[str, bool, dict[str, int]]]] = tuple
        # Of each model of this daemon: its name, tokens of prompts that wait, and seconds until a new one is processed.
        self.loads: Callable[[], Iterable[tuple[str, int, float]]] = tuple
        # Part of the time in which workers compute; what watches the desktop knows.
        self.pace_duty: Callable[[], float] = lambda: 1.0
        # Read when scraped; the link knows.
        self.unacked_aborts: Callable[[], int] = int
        self.audit_lines_lost: Callable[[], int] = int
        # As configured.
        self.has_vllm_names: Callable[[], bool] = bool

    def model(self, name: str) -> ModelMetrics:
        """The numbers of a model, by its resolved name."""
        return self.models[name]

    def key(self, name: str) -> KeyMetrics:
        """The numbers of an API key, by its name."""
        return self.keys[name]

    def declare(self, names: Iterable[str]) -> None:
        """Let the series of these models exist from the start."""
        for name in names:
            self.model(name)

    # Events: called by the pool and the link.

    def step(self, model: str, step: Step) -> None:
        """One decoded `Step`."""
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
        """One heartbeat answered."""
        self.model(model).stats = pong.stats

    def worker_exit(self, model: str, status: int) -> None:
        """A worker process ended; 0 was asked for."""
        if status != 0:
            self.model(model).restarts[str(status)] += 1

    def state(self, model: str, state: str) -> None:
        """A worker's state machine moved."""
        numbers = self.model(model)
        numbers.state = str(state)
        if self.on_state is not None:
            self.on_state(model, numbers.state)
        if state not in ("ready", "draining"):
            numbers.stats, numbers.batch_mode = None, ""

    def load_seconds(self, model: str, s: float) -> None:
        """A load took this long, from spawn to Ready."""
        self.model(model).load.observe(s)

    def batch_mode(self, model: str, mode: str) -> None:
        """Record the batch mode of a worker that is ready: how its rows share a forward pass."""
        self.model(model).batch_mode = mode

    def stale_message(self) -> None:
        """A message of an older epoch was dropped."""
        self.stale_messages += 1

    def malformed_frame(self) -> None:
        """A frame that is no message was dropped."""
        self.malformed_frames += 1

    def worker_stuck(self, model: str) -> None:
        """A worker's step age passed its limit."""
        self.model(model).stuck += 1

    def sequences_resumed(self, model: str, sequences: int) -> None:
        """These went on at another worker."""
        self.model(model).resumes += sequences

    def model_removed(self, model: str) -> None:
        """A model that was taken out of the configuration has stopped: its series end."""
        self.models.pop(model, None)

    def request_quarantined(self, model: str) -> None:
        """A request was found to kill workers."""
        self.model(model).quarantined += 1

    def memory_granted(self, model: str, wait_s: float, reason: str) -> None:
        """A model may be loaded, because there was room or others left."""
        numbers = self.model(model)
        numbers.loads[reason] += 1
        numbers.load_wait.observe(wait_s)

    def model_swapped_in(self, model: str, s: float) -> None:
        """A model for which others had to leave is ready."""
        self.model(model).swap.observe(s)

    def model_evicted(self, model: str, reason: str) -> None:
        """A model was unloaded automatically."""
        self.model(model).evictions[reason] += 1

    def memory_returned(self, model: str, part: float) -> None:
        """Record the part of an ended process's memory that came back in time."""
        self.model(model).returned_part = part

    def memory_trimmed(self, model: str) -> None:
        """A worker was told to use less memory."""
        self.model(model).trims += 1

    def memory_refused(self, model: str) -> None:
        """A request was turned away because the machine is short of memory."""
        self.rejected(model, "memory")

    def worker_recycled(self, model: str) -> None:
        """A worker was restarted because its memory had grown."""
        self.model(model).recycles += 1

    def memory(self, view: MemoryView) -> None:
        """Record the current grants of memory."""
        self.memory_view = view

    # Requests.

    def unhandled_error(self) -> None:
        """A task ended by an exception that is no answer."""
        self.unhandled_errors += 1

    def request_ended(self, model: str | None, key: str | None, status: int) -> None:
        """One HTTP request of an API was answered."""
        counter = self.requests_without_model if model is None else self.model(model).requests
        counter[str(status)] += 1
        if key is not None:
            self.key(key).requests[str(status)] += 1

    def rejected(self, model: str, reason: str) -> None:
        """Admission turned a request away."""
        self.model(model).rejections[reason] += 1
