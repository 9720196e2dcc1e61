"""`/livez`, `/readyz`, `/health`, `/metrics` and `/`.

Deep health check: generates one token with each loaded model.

A probe does not count in any admission queue, key or metric of requests, loads no model, and does not delay the unload
of an idle model. Only the worker's token counts include it.
"""

import asyncio
import struct
import time
from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

import protocol
from gateway.access.caller import NOBODY, OWNER
from gateway.control_types import DeepHealth, Probe
from gateway.errors import BadRequest, Forbidden, Unauthorized, message_of
from gateway.http.bodies import came_to, send_body
from gateway.link.collector import Collector
from gateway.link.transport import WorkerGone
from gateway.request.record import RequestRecord, record_of
from gateway.services import Services
from gateway.telemetry.prometheus import ScrapeText
from gateway.workers.supervisor.state import State, WorkerView
from gateway.workers.supervisor.worker import WorkerHandle
from protocol.checkpoint import AUDIO, EMBED, RERANK
from protocol.from_worker import Finish, Ready
from protocol.to_worker import (
    EmbedPrompt,
    Generate,
    Prompt,
    Sampling,
    ScorePrompt,
    SpeechPrompt,
    TextPrompt,
    TranscribePrompt,
)

DEADLINE_S: Final = 10.0
POLL_S: Final = 0.05
# Requests with a lower number run first. This number is lower than any key's, so a probe runs before all other
# requests.
PROBE_PRIORITY: Final = -1_000_000
BROKEN: Final = frozenset({State.BACKOFF, State.FAILED, State.INCOMPATIBLE})
# No key uses this salt of the prefix cache.
PROBE_SALT: Final = "health"
_PROMPTS: Final[dict[str, Prompt]] = {
    EMBED: EmbedPrompt(("Hi",)),
    RERANK: ScorePrompt(("Hi",), ("Hi",)),
    AUDIO: SpeechPrompt("Hi."),
}
_SPEECH_WITH_INSTRUCTIONS: Final = SpeechPrompt("Hi.", instructions="A calm voice.")
# A clip of silence: 0.25 s at 16 kHz.
_SAMPLES: Final = bytes(8000)
_SILENCE: Final = TranscribePrompt(
    b"RIFF"
    + struct.pack(
        "<I4s4sIHHIIHH4sI", 36 + len(_SAMPLES), b"WAVE", b"fmt ", 16, 1, 1, 16000, 32000, 2, 16, b"data", 8000
    )
    + _SAMPLES
)


def require_admin(record: RequestRecord) -> None:
    """Raises `Unauthorized` or `Forbidden` unless the caller is an admin, because a probe costs a step of
    every model.
    """
    caller = record.caller
    if caller.is_admin:
        return
    if caller.key is None:
        raise Unauthorized("Deep health needs an admin key: mlxctl keys create NAME --admin", None)
    raise Forbidden("Deep health needs an admin key.")


async def examine(services: Services, model: str | None = None, deadline_s: float = DEADLINE_S) -> DeepHealth:
    """Probe all loaded models, or only `model`, concurrently. Raises `ModelNotFound`."""
    names = [view.name for view in services.pool.workers() if view.state is State.READY]
    if model is not None:
        names = [services.live.router.resolve(model, OWNER).name]
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_probe(services, services.pool.worker(name), deadline_s)) for name in names]
    probes = [task.result() for task in running]
    is_good = all(probe.ok for probe in probes)
    return DeepHealth("healthy" if is_good else "unhealthy", probes)


async def _probe(services: Services, worker: WorkerHandle, deadline_s: float) -> Probe:
    began = time.perf_counter()
    steps = _steps(worker)
    error = ""
    try:
        async with asyncio.timeout(deadline_s):
            # A worker takes no requests while another model needs its memory, or while it runs only a request that may
            # crash it.
            while worker.state is State.READY and not worker.is_ready:  # noqa: ASYNC110 - no event announces it
                await asyncio.sleep(POLL_S)
            if worker.state is not State.READY:
                return Probe(worker.name, worker.state not in BROKEN, str(worker.state), 0.0, "")
            error = await _one_token(services, worker)
    except WorkerGone:
        error = "its worker cannot be reached"
    except TimeoutError:
        if _steps(worker) != steps:
            # Other requests occupied all rows, and their steps show that the model works.
            return Probe(worker.name, True, "busy", _ms(began), "")
        error = f"no token within {deadline_s:g} s"
    return Probe(worker.name, not error, "failed" if error else "ready", _ms(began), error)


async def _one_token(services: Services, worker: WorkerHandle) -> str:
    """Generate one token, vector, score or clip. Returns the error, or an empty string. Raises `WorkerGone`."""
    link = services.link
    request = Generate(
        link.next_rid(),
        prompt_for(worker.ready),
        Sampling(temperature=0.0),
        max_tokens=1,
        priority=PROBE_PRIORITY,
        cache_salt=PROBE_SALT,
    )
    collector = link.submit(worker, [request])
    try:
        return await _ending(collector)
    finally:
        link.abort(collector.rids, "health")


def prompt_for(ready: Ready | None) -> Prompt:
    """Return the smallest prompt for a model of this kind."""
    audio = ready.audio if ready is not None else None
    if audio is not None and audio.transcribes:
        return _SILENCE
    if audio is not None and audio.needs_instructions:
        return _SPEECH_WITH_INSTRUCTIONS
    return _PROMPTS.get(ready.kind if ready is not None else "", TextPrompt("Hi"))


async def _ending(collector: Collector) -> str:
    while True:
        for delta in await collector.read_deltas():
            if delta.finish in (Finish.ERROR, Finish.ABORT):
                return delta.failure.message if delta.failure is not None else "it was aborted"
            if delta.finish is not None:
                return ""


def _steps(worker: WorkerHandle) -> tuple[int, int]:
    return worker.epoch, worker.stats.step_seq if worker.stats is not None else 0


def _ms(began: float) -> float:
    return round((time.perf_counter() - began) * 1000, 1)


OLLAMA_RUNNING: Final = b"Ollama is running"
_STORE_DAMAGED: Final = "the store of responses was damaged: it was set aside, and a new one begun"


class Health(Struct, frozen=True):
    """Health of the daemon. `reasons` are its problems; `notes` name models that run slower than they could."""

    status: str
    reasons: list[str] = []
    notes: list[str] | UnsetType = UNSET


class AboutServer(Struct, frozen=True):
    """The answer to `GET /`, for a person who opens the address in a browser."""

    version: str
    models: list[str]
    name: str = "mlxd"
    api: str = "/v1"
    health: str = "/health"
    metrics: str = "/metrics"
    openapi: str = "/openapi.json"


async def live(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /livez`: the gateway answers."""
    await send_body(send, 200, msgspec.json.encode(Health("alive")))


async def ready(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /readyz`: 503 while draining, and before the models to preload are ready.

    Every client gets the status; names and reasons only of models that it may use. `?model=` is for a router that has
    each model as an endpoint of its own: whether it is loaded and takes requests.
    """
    reasons = ["draining"] if services.admission.takes_none else []
    if name := QueryParams(scope["query_string"]).get("model"):
        await send_body(send, *_model_readiness(name, scope, services, reasons))
        return
    missing = [view for view in services.pool.workers() if view.is_preload and view.state is not State.READY]
    is_ready = not reasons and not missing
    reasons += _describe(missing, scope, services)
    body = Health("ready" if is_ready else "not ready", reasons)
    await send_body(send, 200 if is_ready else 503, msgspec.json.encode(body))


def _model_readiness(name: str, scope: Scope, services: Services, reasons: list[str]) -> tuple[int, bytes]:
    """Return status and body for one model of this daemon.

    Raises `ModelNotFound`, also for a model that the caller may not use.
    """
    caller = record_of(scope).caller
    worker = services.pool.worker(services.live.router.locate(name, caller).model.name)
    if not worker.is_ready:
        # A READY worker that is not ready to serve is waiting, because its memory is needed elsewhere.
        is_held = worker.state is State.READY
        reason = f"model {worker.name} waits for memory" if is_held else _reason(worker.view(), caller.is_admin)
        reasons = [*reasons, reason]
    body = msgspec.json.encode(Health("not ready" if reasons else "ready", reasons))
    return 503 if reasons else 200, body


async def health(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /health`: 200 while the gateway can serve anything, with its problems.

    `?deep=1` generates a token with each loaded model, or with the one that `&model=` names; 503 if any fails.
    """
    record, query = record_of(scope), QueryParams(scope["query_string"])
    depth = query.get("deep", "0")
    if depth not in ("0", "1"):
        raise BadRequest(f"'deep' is 0 or 1, not {depth[:40]!r}.", "deep", "invalid_value")
    if depth == "1":
        require_admin(record)
    if services.admission.takes_none:
        await send_body(send, 503, msgspec.json.encode(Health("draining")))
        return
    if depth == "1":
        probed = await examine(services, query.get("model"))
        await send_body(send, 200 if probed.status == "healthy" else 503, msgspec.json.encode(probed))
        return
    views = services.pool.workers()
    broken = [view for view in views if view.state in BROKEN]
    reasons, is_store_damaged = _describe(broken, scope, services), services.metrics.store_problems["damaged"] > 0
    if is_store_damaged and record.caller is not NOBODY:
        reasons.append(_STORE_DAMAGED)
    can_serve = not broken or len(broken) < len(views)
    status = "healthy" if not broken and not is_store_damaged else "degraded" if can_serve else "unhealthy"
    body = Health(status, reasons, _notes(views, scope, services) or UNSET)
    await send_body(send, 200 if can_serve else 503, msgspec.json.encode(body))


VLLM_NAMES: Final = "vllm"


class Scrape:
    """ASGI endpoint of the metrics in Prometheus' text format. The query `names=vllm` adds vLLM's names."""

    def __init__(self, services: Services) -> None:
        self._texts = {
            names: ScrapeText(services.metrics, has_vllm_names=names == VLLM_NAMES) for names in (None, VLLM_NAMES)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = QueryParams(scope["query_string"]).get("names")
        if (text := self._texts.get(names)) is None:
            raise BadRequest(f"'names' is {VLLM_NAMES!r} or left out.", "names", "invalid_value")
        await send_body(send, 200, await text.read(), kind=CONTENT_TYPE_LATEST.encode())


async def root(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `GET /`: name, version and models, or on Ollama's port the text that its clients look for."""
    if came_to(scope, services.config.server.ollama_port):
        await send_body(send, 200, OLLAMA_RUNNING, kind=b"text/plain; charset=utf-8")
        return
    models = record_of(scope).caller.usable(services.config.models.values())
    about = AboutServer(protocol.__version__, [model.name for model in models])
    await send_body(send, 200, msgspec.json.encode(about))


def _describe(views: list[WorkerView], scope: Scope, services: Services) -> list[str]:
    """Return the reasons why models are not healthy, for models that the caller may use."""
    caller = record_of(scope).caller
    return [_reason(view, caller.is_admin) for view in views if caller.may_use(services.config.models[view.name])]


def _notes(views: list[WorkerView], scope: Scope, services: Services) -> list[str]:
    """Return notes on models that the caller may use and that batch less than they could, in order to keep outputs
    exact.
    """
    caller = record_of(scope).caller
    reasons = [(view.name, view.ready.batch_mode_reason) for view in views if view.ready is not None]
    return [f"{name}: {why}" for name, why in reasons if why and caller.may_use(services.config.models[name])]


def _reason(view: WorkerView, is_operator: bool) -> str:
    # A draining worker has not failed: the last failure belongs to an earlier worker.
    failure = None if view.state is State.DRAINING else view.last_failure
    cause = f": {message_of(failure, is_operator)}" if failure is not None else ""
    return f"model {view.name} is {view.state}{cause}"
