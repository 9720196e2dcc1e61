"""Bodies of the control API, which the gateway and `mlxctl` share."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.stats import StatusStats


class Speeds(Struct, frozen=True):
    """Measured speeds of a model on this machine. `decode` maps numbers of rows to tokens per second.

    `calibrated_at` is a Unix time, 0 without a calibration. Only a calibration finds `max_running`.
    """

    load_s: float = 0.0
    decode: tuple[tuple[int, float], ...] = ()
    prefill: float = 0.0
    calibrated_at: float = 0.0
    max_running: int = 0


class RankStatus(Struct, frozen=True):
    """One rank of a model's group. `active_bytes` is the memory that MLX has allocated in the rank's process."""

    rank: int
    node: str
    host: str
    pid: int
    device: str
    weights_bytes: int
    active_bytes: int
    step_ms: float


class GroupStatus(Struct, frozen=True):
    """A model that several processes run together."""

    parallel: str
    backend: str
    ranks: tuple[RankStatus, ...]


class ModelStatus(StatusStats, frozen=True):
    """One model with its worker's statistics. Numbers are 0 and texts empty while no worker runs."""

    name: str
    path: str
    aliases: tuple[str, ...]
    state: str
    pid: int
    epoch: int
    since_s: float
    inside: int
    slots: int
    queue_bound: int
    context: int
    weights_bytes: int
    restarts: int
    stage: str
    loaded_bytes: int
    total_bytes: int
    generation_tokens: int
    prompt_tokens: int
    prompt_tokens_cached: int
    last_failure: str
    retry_after_s: float
    # `share_bytes` is the granted part of the memory budget, `floor_bytes` the minimum that the model needs, and
    # `footprint_bytes` the measured memory of its process.
    share_bytes: int = 0
    floor_bytes: int = 0
    footprint_bytes: int = 0
    is_pinned: bool = False
    # `idle_s` counts seconds since the newest request; None while the model is not loaded.
    idle_s: float | None = None
    # A gated model accepts no requests while it makes room; a waiting model waits for memory.
    is_gated: bool = False
    is_waiting: bool = False
    # `batch_mode_reason` says why exact tokens require a slower mode.
    batch_mode: str = ""
    batch_mode_reason: str = ""
    # `modalities` lists what a loaded model accepts besides text, `tower_bytes` is the size of its towers, and
    # `media_reason` says why a modality is missing.
    modalities: tuple[str, ...] = ()
    tower_bytes: int = 0
    media_reason: str = ""
    # `speculation` is `auto`, or `off` with the reason.
    speculation: str = ""
    # `attention` is how steps with few tokens per row compute attention: `kernel`, or `mlx` with the reason.
    attention: str = ""
    # `kind` of a loaded model is `text`, `embed`, `rerank` or `audio`; `dimensions` is the length of its embeddings.
    kind: str = ""
    dimensions: int = 0
    measured: Speeds | None = None
    group: GroupStatus | None = None


class AdapterStatus(Struct, frozen=True):
    """An adapter of a model. Its state is `loaded`, `failed`, or `unloaded` while its model is.

    `base` is the base model that the adapter's files name; `requests` counts the sequences that used the adapter.
    """

    name: str
    model: str
    path: str
    state: str
    kind: str = ""
    rank: int = 0
    size_bytes: int = 0
    base: str = ""
    failure: str = ""
    # False for an adapter that a command has loaded.
    is_configured: bool = True
    requests: int = 0


class AdapterList(Struct, frozen=True):
    adapters: list[AdapterStatus]


class AdapterLoad(Struct, frozen=True, forbid_unknown_fields=True):
    """Command to load an adapter, with vLLM's fields. `model` is required if there are several models."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    model: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class AdapterRef(Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=500)]
    lora_int_id: int | None = None


class MemoryStatus(Struct, frozen=True):
    """Memory of all models together. `waiting` lists models in the order in which they will get memory."""

    budget_bytes: int
    granted_bytes: int
    footprint_bytes: int
    waiting: tuple[str, ...]


class DaemonStatus(Struct, frozen=True):
    version: str
    pid: int
    uptime_s: float
    url: str
    home: str
    config_path: str
    is_draining: bool
    models: list[ModelStatus]
    memory: MemoryStatus | None = None


ModelVerb = Literal["load", "unload", "restart", "pin", "unpin"]


class ModelRef(Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1)]


class CommandDone(Struct, frozen=True):
    """Answer on the unix socket: the command has been carried out."""

    model: str
    state: str


class OrderAccepted(Struct, frozen=True):
    """Answer 202 on the web page: the command was accepted. The feed shows its progress, and the model's `last_failure`
    its failure.
    """

    model: str
    order: ModelVerb


class DrainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s` is the time that running requests get; None means the configured time.

    With `stays`, the daemon refuses new requests until `undrain`, and does not end.
    """

    timeout_s: Annotated[float, Meta(ge=0, le=3600)] | None = None
    stays: bool = False


class DrainResult(Struct, frozen=True):
    """`cut_off` counts the requests that had not finished at the drain's deadline."""

    cut_off: int


class KeyUsage(Struct, frozen=True):
    """Usage of one API key. `rejections` maps reasons to counts; `last_used` is a Unix time, or 0 before the first."""

    name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    running: int
    rejections: dict[str, int]
    last_used: float = 0.0


class UsageReport(Struct, frozen=True):
    """Usage of all API keys since a Unix time. `failures` counts requests without a valid key."""

    since: float
    keys: list[KeyUsage]
    failures: dict[str, int]


class UsageLine(Struct, frozen=True):
    """Sums of usage. A column is None if the sums are not grouped by it. `requests` counts sequences."""

    day: str | None
    key: str | None
    model: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageLines(Struct, frozen=True):
    """Usage from the first day to the last, both included."""

    first: str
    last: str
    by: list[str]
    lines: list[UsageLine]


class RequestView(Struct, frozen=True, kw_only=True):
    """One running request. Its id is the `x-request-id` header; the gateway makes an id if the client sends none."""

    id: str
    model: str
    key: str | None
    path: str
    stream: bool
    state: str
    age_s: float
    sequences: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    tokens_per_s: float
    ttft_s: float | None
    # Prompt tokens that are in the KV cache, including those that were cached before; 0 before prefill.
    prefilled_tokens: int = 0
    # Estimated rest of the prefill, at the request's own speed; null if unknown.
    prefill_left_s: float | None = None


class RequestTiming(Struct, frozen=True, kw_only=True):
    """Times of a request in milliseconds, and what they were spent on. Of several sequences, the longest times count.

    `load_ms` is any wait for the model, `queue_ms` the wait in its worker. `paused_ms` is the part of the later phases
    in which the sequence was preempted or waited for its grammar, `rested_ms` that in which the worker was throttled.
    """

    total_ms: float = 0.0
    ttft_ms: float | None = None
    load_ms: float = 0.0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    paused_ms: float = 0.0
    rested_ms: float = 0.0
    prompt_tokens: int = 0
    # Prompt tokens from the prefix cache, and those of them that were read from disk.
    cached_tokens: int = 0
    restored_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    # Tokens of drafts, and those that were accepted.
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    grammar_waits: int = 0
    # Number of workers that were lost while they had the request.
    resumes: int = 0


class SlowCause(Struct, frozen=True):
    """Why a request took this time: a code for programs, the time in milliseconds (0 if unknown), and a sentence."""

    code: str
    ms: float
    text: str
    tokens: int = 0


class RequestWhy(Struct, frozen=True, kw_only=True):
    """Explanation of a request that has ended, the worst cause first. `at` is the Unix time of its arrival.

    `compared` is the id of the earlier request with which the prompt was compared, or empty.
    """

    id: str
    answer_id: str
    model: str
    key: str | None
    path: str
    at: float
    outcome: str
    timing: RequestTiming
    causes: list[SlowCause]
    compared: str = ""


class CapturedLine(Struct, frozen=True, kw_only=True):
    """One captured request without its bodies. `at` is a Unix time."""

    id: str
    at: float
    method: str
    path: str
    model: str
    key: str | None
    status: int
    outcome: str
    ms: float


class RequestList(Struct, frozen=True):
    """Running requests, the oldest first, and captured requests if the query includes them."""

    requests: list[RequestView]
    captured: list[CapturedLine] = []


class RequestRef(Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)]


class CancelResult(Struct, frozen=True):
    """Id of the cancelled request."""

    id: str


class BatchView(Struct, frozen=True, kw_only=True):
    """One batch. `model` is empty if its requests name several. `failed` counts the requests without an answer too."""

    id: str
    key: str | None
    model: str
    endpoint: str
    state: str
    total: int
    succeeded: int
    failed: int
    age_s: float
    expires_in_s: float


class BatchViews(Struct, frozen=True):
    """Batches of all keys, the oldest first."""

    batches: list[BatchView]


class CapturedRequest(CapturedLine, frozen=True, kw_only=True):
    """One captured request with its bodies. Headers that may contain secrets have no value."""

    request_headers: list[tuple[str, str]]
    request_body: str
    is_request_cut: bool
    response_headers: list[tuple[str, str]]
    response_body: str
    is_response_cut: bool


class RequestDetail(Struct, frozen=True):
    """A running request, a captured request, or both if they have the same id."""

    live: RequestView | None = None
    captured: CapturedRequest | None = None


class ClearedCaptures(Struct, frozen=True):
    """Number of captured requests that were deleted."""

    captured: int


class Probe(Struct, frozen=True):
    """Result of generating one token as a probe. In state `busy`, other requests kept the model from serving it."""

    model: str
    ok: bool
    state: str
    ms: float
    error: str


class DeepHealth(Struct, frozen=True):
    """Result of all probes. `status` is `healthy` if each succeeded, and `draining` while the daemon drains."""

    status: str
    models: list[Probe] = []


class UiCode(Struct, frozen=True):
    """Link to the web page with a code that logs in once, within `expires_s`."""

    url: str
    code: str
    expires_s: float


class UiRevoked(Struct, frozen=True):
    """Number of the web page's sessions that were ended."""

    sessions: int


class ReloadResult(Struct, frozen=True):
    """Changes of a reload: names of models, and changed keys such as `server.drain` and `models.NAME.sampling`.

    A restarted model resumes its streams; a removed model finishes its streams first.
    """

    added: list[str]
    removed: list[str]
    restarted: list[str]
    changed: list[str]
    needs_restart: list[str]
