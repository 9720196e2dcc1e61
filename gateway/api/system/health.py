"""`/livez`, `/readyz`, `/health`, `/metrics` and `/`."""

from typing import Final

import msgspec
from msgspec import UNSET, Struct, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

import protocol
from gateway.access.caller import NOBODY
from gateway.api.system import probe
from gateway.api.system.probe import BROKEN
from gateway.errors import BadRequest, message_of
from gateway.http.exchange import came_to, send_body
from gateway.request.record import record_of
from gateway.services import Services
from gateway.telemetry.scrape import ScrapeText
from gateway.workers.supervisor.state import State, WorkerView

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
    worker = services.pool.worker(services.router.locate(name, caller).model.name)
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
        probe.require_admin(record)
    if services.admission.takes_none:
        await send_body(send, 503, msgspec.json.encode(Health("draining")))
        return
    if depth == "1":
        probed = await probe.examine(services, query.get("model"))
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


class Scrape:
    """ASGI endpoint of the metrics in Prometheus' text format."""

    def __init__(self, services: Services) -> None:
        self._text = ScrapeText(services.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, await self._text.read(), kind=CONTENT_TYPE_LATEST.encode())


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
