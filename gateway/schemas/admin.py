"""What the admin API takes and gives: read by the gateway and by `mlxctl`, so it imports neither."""

from typing import Annotated

from msgspec import Meta, Struct


class ModelStatus(Struct, frozen=True):
    """One model; numbers are 0 and texts empty while its worker does not run."""

    name: str
    path: str
    aliases: tuple[str, ...]
    state: str
    pid: int
    epoch: int
    since_s: float
    running: int
    waiting: int
    inside: int
    slots: int
    queue_bound: int
    context: int
    weights_bytes: int
    memory_bytes: int
    active_bytes: int
    peak_bytes: int
    cache_bytes: int
    kv_bytes: int
    step_age_ms: int
    restarts: int
    stage: str
    loaded_bytes: int
    total_bytes: int
    generation_tokens: int
    last_failure: str
    retry_after_s: float


class Status(Struct, frozen=True):
    version: str
    pid: int
    uptime_s: float
    url: str
    home: str
    config_path: str
    is_draining: bool
    models: list[ModelStatus]


class ModelRef(Struct, frozen=True, forbid_unknown_fields=True):
    model: Annotated[str, Meta(min_length=1)]


class Done(Struct, frozen=True):
    model: str
    state: str


class KeyUsage(Struct, frozen=True):
    """What one API key has used; `rejections` by reason."""

    name: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    running: int
    rejections: dict[str, int]


class UsageReport(Struct, frozen=True):
    """`since` is when the daemon started, in seconds since 1970; `failures` are requests without a valid key."""

    since: float
    keys: list[KeyUsage]
    failures: dict[str, int]
