"""Bodies of the control API, which the gateway and `mlxctl` share."""

from typing import Annotated

from msgspec import Meta, Struct, field

from protocol.stats import StatusStats


class Speeds(Struct, frozen=True):
    """Measured speeds of a model on this machine. `decode` has tokens a second by number of rows.

    `calibrated_at` is a Unix time, 0 without a calibration. Only a calibration finds `max_running`.
    """

    load_s: float = 0.0
    decode: tuple[tuple[int, float], ...] = ()
    prefill: float = 0.0
    calibrated_at: float = 0.0
    max_running: int = 0


class RankStatus(Struct, frozen=True):
    """One rank of a model's group. `active_bytes` are allocated by MLX in its process."""

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
    """One model with the statistics of its worker. Numbers are 0 and texts empty while no worker runs."""

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
    # Granted part of the memory budget, the least that the model needs, and the measured memory of its process.
    share_bytes: int = 0
    floor_bytes: int = 0
    footprint_bytes: int = 0
    is_pinned: bool = False
    # Seconds since the newest request; None while the model is not loaded.
    idle_s: float | None = None
    # A gated model accepts no requests while it makes room; a waiting model waits for memory.
    is_gated: bool = False
    is_waiting: bool = False
    # Batch mode, and the reason for a slower mode that exact tokens require.
    batch_mode: str = field(default="", name="lane")
    batch_mode_reason: str = field(default="", name="lane_reason")
    # Modalities of a loaded model other than text, bytes of its towers, and the reason for missing modalities.
    modalities: tuple[str, ...] = ()
    tower_bytes: int = 0
    media_reason: str = ""
    # State of drafting: `auto`, or `off` with the reason.
    speculation: str = ""
    # Attention of few tokens a row: `kernel`, or `mlx` with the reason.
    attention: str = ""
    # Kind of a loaded model (`text`, `embed`, `rerank` or `audio`), and the length of its embeddings.
    kind: str = ""
    dimensions: int = 0
    measured: Speeds | None = None
    group: GroupStatus | None = None


class AdapterStatus(Struct, frozen=True):
    """An adapter of a model: `loaded`, `failed`, or `unloaded` like its model.

    `base` is the model that its files name as its base; `requests` counts the sequences that used it.
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
    """Memory of all models together. `waiting` models are in the order in which they will get memory."""

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


class ModelRef(Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1)]


class PlaceView(Struct, frozen=True):
    """A daemon that could serve a request: a peer, or this daemon, whose name is empty. Times are in seconds.

    `objection` is the reason why it is not eligible; its numbers are 0 then.
    """

    name: str
    state: str
    form: str = ""
    wait_s: float = 0.0
    load_s: float = 0.0
    prefill_rate: float = 0.0
    cost_s: float = 0.0
    objection: str = ""
    is_chosen: bool = False


class RouteView(Struct, frozen=True):
    """Places that could serve a model, and the reason for the choice: `only`, `cost` or `affinity`; else all peers."""

    model: str
    reason: str
    places: list[PlaceView]


class CommandDone(Struct, frozen=True):
    model: str
    state: str


class DrainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s` is the time for running requests; None is the configured time.

    A daemon that `stays` refuses new requests until `undrain`, and does not end.
    """

    timeout_s: Annotated[float, Meta(ge=0, le=3600)] | None = None
    stays: bool = False


class DrainResult(Struct, frozen=True):
    """Number of requests that had not finished at the drain's deadline."""

    cut_off: int


class KeyUsage(Struct, frozen=True):
    """Usage of one API key. `rejections` are counted by reason; `last_used` is a Unix time, or 0 for never."""

    name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    running: int
    rejections: dict[str, int]
    last_used: float = 0.0


class UsageReport(Struct, frozen=True):
    """`since` is the Unix time at which counting began; `failures` are requests without a valid key."""

    since: float
    keys: list[KeyUsage]
    failures: dict[str, int]


class UsageLine(Struct, frozen=True):
    """Sums of usage; columns that they are not grouped by are None. `requests` are sequences."""

    day: str | None
    key: str | None
    model: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageLines(Struct, frozen=True):
    """Usage from the first to the last day, both included."""

    first: str
    last: str
    by: list[str]
    lines: list[UsageLine]


class RequestView(Struct, frozen=True, kw_only=True):
    """One running request. Its id is the `x-request-id` header, which the gateway makes if the client sends none."""

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
    # Tokens of the prompt that are in the KV cache, including cached ones; 0 before prefill.
    prefilled_tokens: int = 0


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


class CapturedRequest(CapturedLine, frozen=True, kw_only=True):
    """One request with its bodies. Headers that may hold secrets have no value."""

    request_headers: list[tuple[str, str]]
    request_body: str
    is_request_cut: bool
    response_headers: list[tuple[str, str]]
    response_body: str
    is_response_cut: bool


class RequestDetail(Struct, frozen=True):
    """A running request, a captured one, or both of the same id."""

    live: RequestView | None = None
    captured: CapturedRequest | None = None


class ClearedCaptures(Struct, frozen=True):
    """Number of captured requests that were deleted."""

    captured: int


class Probe(Struct, frozen=True):
    """Result of a probe for one token. In state `busy`, other requests kept the probe from being served."""

    model: str
    ok: bool
    state: str
    ms: float
    error: str


class DeepHealth(Struct, frozen=True):
    """`status` is `healthy` if every probe succeeded, and `draining` if no model was probed."""

    status: str
    models: list[Probe] = []


class UiCode(Struct, frozen=True):
    """Link of the page with a code that logs in once, within `expires_s`."""

    url: str
    code: str
    expires_s: float


class UiRevoked(Struct, frozen=True):
    """Number of sessions of the page that were ended."""

    sessions: int


class ReloadResult(Struct, frozen=True):
    """Changes of a reload: names of models, and keys such as `server.drain` and `models.NAME.sampling`.

    A restarted model resumes its streams; a removed model finishes them first.
    """

    added: list[str]
    removed: list[str]
    restarted: list[str]
    changed: list[str]
    needs_restart: list[str]
