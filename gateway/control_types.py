"""Bodies of the admin API: read by the gateway and by `mlxctl`, so it imports neither."""

from typing import Annotated

from msgspec import Meta, Struct, field

from protocol.stats import StatusStats


class Speeds(Struct, frozen=True):
    """Speeds of a model on this machine: tokens a second of rows that generate, by how many there are, and of a prompt.

    `calibrated_at` is in seconds since 1970, 0 without a calibration, which alone says `max_running`.
    """

    load_s: float = 0.0
    decode: tuple[tuple[int, float], ...] = ()
    prefill: float = 0.0
    calibrated_at: float = 0.0
    max_running: int = 0


class RankStatus(Struct, frozen=True):
    """One rank of a model's group: its node and process, its weights, and what MLX has allocated there."""

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
    """One model, with the statistics of its worker; numbers are 0 and texts empty while its worker does not run."""

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
    # Its part of the memory budget, what it cannot be without, and what was measured from outside.
    share_bytes: int = 0
    floor_bytes: int = 0
    footprint_bytes: int = 0
    is_pinned: bool = False
    # Since its newest request; None while it is not loaded.
    idle_s: float | None = None
    # It takes no new requests until it has made room, or room is being made for it.
    is_gated: bool = False
    is_waiting: bool = False
    # How rows share a forward pass, and what had to be given up for exact tokens, with the reason.
    batch_mode: str = field(default="", name="lane")
    batch_mode_reason: str = field(default="", name="lane_reason")
    # Of one that is loaded: what its prompts may hold beside text, bytes of its towers, and why it takes no more.
    modalities: tuple[str, ...] = ()
    tower_bytes: int = 0
    media_reason: str = ""
    # `auto`, or `off` with the reason.
    speculation: str = ""
    # Attention of few tokens a row: `kernel`, or `mlx` with the reason.
    attention: str = ""
    # Of one that is loaded: `text`, `embed`, `rerank` or `audio`; and the length of embeddings.
    kind: str = ""
    dimensions: int = 0
    # Speeds that its workers have measured on this machine, also while it is not loaded.
    measured: Speeds | None = None
    # Of one that is loaded and that several processes run.
    group: GroupStatus | None = None


class AdapterStatus(Struct, frozen=True):
    """An adapter of a model: `loaded`, `failed` with its reason, or `unloaded` as its model is.

    `base` is what its files say that it was trained on; `requests` are sequences that have named it.
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
    # By the configuration, not by an order.
    is_configured: bool = True
    requests: int = 0


class AdapterList(Struct, frozen=True):
    adapters: list[AdapterStatus]


class AdapterLoad(Struct, frozen=True, forbid_unknown_fields=True):
    """Order to load an adapter, in vLLM's fields; `model` names its base where there are several models."""

    lora_name: Annotated[str, Meta(min_length=1, max_length=200)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]
    model: str = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class AdapterRef(Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=500)]
    lora_int_id: int | None = None


class MemoryStatus(Struct, frozen=True):
    """The memory of all models together; `waiting` are those for which room is being made, in order."""

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
    """A daemon that could serve a request: a peer, or this one, whose name is empty. Times in seconds.

    `objection` is why it is no choice; numbers are 0 then.
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
    """The places of a model and why one of them is chosen: `only`, `cost` or `affinity`; without a model the peers."""

    model: str
    reason: str
    places: list[PlaceView]


class CommandDone(Struct, frozen=True):
    model: str
    state: str


class DrainRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """`timeout_s` is what running requests get; None is what the configuration gives them.

    A daemon that `stays` refuses new requests until it is told otherwise, and ends nothing.
    """

    timeout_s: Annotated[float, Meta(ge=0, le=3600)] | None = None
    stays: bool = False


class DrainResult(Struct, frozen=True):
    """Number of requests that had not finished at the drain's deadline."""

    cut_off: int


class KeyUsage(Struct, frozen=True):
    """Usage of one API key; `rejections` by reason, `last_used` in seconds since 1970, 0 for never."""

    name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    running: int
    rejections: dict[str, int]
    last_used: float = 0.0


class UsageReport(Struct, frozen=True):
    """`since` is when counting began, in seconds since 1970; `failures` are requests without a valid key."""

    since: float
    keys: list[KeyUsage]
    failures: dict[str, int]


class UsageLine(Struct, frozen=True):
    """Sums of usage; `requests` are sequences, `cached_tokens` a part of the prompt's. What it is not by is None."""

    day: str | None
    key: str | None
    model: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class UsageLines(Struct, frozen=True):
    """The first and the last day, and what was used from one to the other, both included."""

    first: str
    last: str
    by: list[str]
    lines: list[UsageLine]


class RequestView(Struct, frozen=True, kw_only=True):
    """One request that is being served. Its id is its client's `x-request-id`, or the one that its client got."""

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
    # Of the prompt, cached ones included; 0 before its prefill begins.
    prefilled_tokens: int = 0


class CapturedLine(Struct, frozen=True, kw_only=True):
    """One captured request in short; `at` in seconds since 1970."""

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
    """Those that are being served, the oldest first; those that were captured, if asked for."""

    requests: list[RequestView]
    captured: list[CapturedLine] = []


class RequestRef(Struct, frozen=True, forbid_unknown_fields=True):
    id: Annotated[str, Meta(min_length=1, max_length=200)]


class CancelResult(Struct, frozen=True):
    """The request of this id was told to end."""

    id: str


class CapturedRequest(CapturedLine, frozen=True, kw_only=True):
    """One request as it was. A body that was cut says so; headers that may hold secrets say nothing."""

    request_headers: list[tuple[str, str]]
    request_body: str
    is_request_cut: bool
    response_headers: list[tuple[str, str]]
    response_body: str
    is_response_cut: bool


class RequestDetail(Struct, frozen=True):
    """A request that runs, or one that was captured."""

    live: RequestView | None = None
    captured: CapturedRequest | None = None


class ClearedCaptures(Struct, frozen=True):
    """Number of captured requests that were deleted."""

    captured: int


class Probe(Struct, frozen=True):
    """Result of probing a model for one token. `busy`: the probe was not served because other requests were."""

    model: str
    ok: bool
    state: str
    ms: float
    error: str


class DeepHealth(Struct, frozen=True):
    """`status` is `healthy` when all did what they should, `draining` when no model was probed."""

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
