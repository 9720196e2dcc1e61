"""Running models and their speed, computed from two samples a short while apart. `ps` and `top` use it."""

import time
from collections.abc import Callable
from typing import Any, Final

from msgspec import Struct

from gateway.control_types import DaemonStatus, ModelStatus

SPAN_S: Final = 0.5


class ModelSample(ModelStatus, frozen=True, kw_only=True):
    """Status of a model with a process, and its rates. `memory_bytes` is the measured memory of the process if known,
    and `waiting` also counts requests that wait for the worker.
    """

    uptime_s: float
    tokens_per_s: float
    # Fraction of prompt tokens since the daemon's start that were cached; None if there were none.
    cache_hit_rate: float | None
    # Progress of a load, from 0 to 1.
    loaded: float


class RateSample(Struct, frozen=True):
    """All running models and their sums. `waiting` also counts requests for models without a process."""

    version: str
    url: str
    pid: int
    uptime_s: float
    is_draining: bool
    span_s: float
    memory_bytes: int
    running: int
    waiting: int
    tokens_per_s: float
    models: list[ModelSample]


def sample_rates(look: Callable[[], DaemonStatus], span_s: float) -> RateSample:
    """Sample the daemon twice and compute rates. If no model has a request, one sample is enough."""
    before = look()
    if not any(model.inside for model in before.models):
        return compare(before, before, 0.0)
    began = time.monotonic()
    time.sleep(span_s)
    return compare(before, look(), time.monotonic() - began)


def compare(before: DaemonStatus, after: DaemonStatus, span_s: float) -> RateSample:
    """Compute rates between two samples."""
    old = {model.name: model for model in before.models}
    models = [_model(old.get(model.name), model, span_s) for model in after.models if model.pid]
    return RateSample(
        version=after.version,
        url=after.url,
        pid=after.pid,
        uptime_s=after.uptime_s,
        is_draining=after.is_draining,
        span_s=round(span_s, 3),
        memory_bytes=sum(model.memory_bytes for model in models),
        running=sum(model.running for model in models),
        waiting=sum(waiting(model) for model in after.models),
        tokens_per_s=round(sum(model.tokens_per_s for model in models), 1),
        models=models,
    )


def waiting(model: ModelStatus) -> int:
    """Count the requests that wait, inside the worker or for the worker."""
    return max(model.waiting, model.inside - model.running)


def _model(before: ModelStatus | None, after: ModelStatus, span_s: float) -> ModelSample:
    # The gateway keeps this counter, so a worker's restart does not reset it.
    tokens = max(0, after.generation_tokens - (before or after).generation_tokens)
    own: dict[str, Any] = {
        "uptime_s": _uptime_s(after.pid),
        "waiting": waiting(after),
        # The footprint is the measured memory of the process; 0 if it could not be measured.
        "memory_bytes": after.footprint_bytes or after.memory_bytes,
        "tokens_per_s": round(tokens / span_s, 1) if span_s else 0.0,
        "cache_hit_rate": round(after.prompt_tokens_cached / after.prompt_tokens, 4) if after.prompt_tokens else None,
        "loaded": after.loaded_bytes / after.total_bytes if after.total_bytes else 0.0,
    }
    same = {name: getattr(after, name) for name in ModelStatus.__struct_fields__ if name not in own}
    return ModelSample(**own, **same)


def _uptime_s(pid: int) -> float:
    import psutil

    try:
        return round(max(0.0, time.time() - psutil.Process(pid).create_time()), 1)
    except psutil.Error:
        return 0.0
