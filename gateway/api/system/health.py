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
    """`reasons` say what is wrong; `notes` what works, but not as fast as it could."""

    status: str
    reasons: list[str] = []
    notes: list[str] | UnsetType = UNSET


class AboutEndpoint(Struct, frozen=True):
    """The answer to `GET /`, for a person who opens the address in a browser."""

    version: str
    models: list[str]
    name: str = "mlxd"
    api: str = "/v1"
    health: str = "/health"
    metrics: str = "/metrics"
    openapi: str = "/openapi.json"


class LiveEndpoint:
    """Liveness: the gateway answers."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, msgspec.json.encode(Health("alive")))


class Readiness:
    """Readiness: whether traffic should come. Not while draining, nor before the models to preload are ready.

    Every client gets the status; names and reasons only of models that it may use. `?model=` asks for one of these:
    whether it is loaded and takes requests, for a router that has each model as an endpoint of its own.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reasons = ["draining"] if self._services.admission.takes_none else []
        if name := QueryParams(scope["query_string"]).get("model"):
            await send_body(send, *self._of_model(name, scope, reasons))
            return
        views = self._services.pool.workers()
        missing = [view for view in views if view.is_preload and view.state is not State.READY]
        is_ready = not reasons and not missing
        reasons += _describe(missing, scope, self._services)
        body = Health("ready" if is_ready else "not ready", reasons)
        await send_body(send, 200 if is_ready else 503, msgspec.json.encode(body))

    def _of_model(self, name: str, scope: Scope, reasons: list[str]) -> tuple[int, bytes]:
        """Status and body for one model of this daemon. Raises `ModelNotFound`, also without a key that may use it."""
        services = self._services
        worker = services.pool.worker(services.router.locate_here(name, record_of(scope).caller).model.name)
        if not worker.is_ready:
            held = worker.state is State.READY
            reasons = [
                *reasons,
                f"model {worker.name} waits for memory"
                if held
                else _reason(worker.view(), record_of(scope).caller.is_admin),
            ]
        body = msgspec.json.encode(Health("not ready" if reasons else "ready", reasons))
        return 503 if reasons else 200, body


class HealthResponse:
    """For people and monitors: 200 while the gateway can serve anything, with what is wrong.

    `?deep=1` asks each loaded model for a token, or the one that `&model=` names; 503 when any does not give it.
    """

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = QueryParams(scope["query_string"])
        depth = query.get("deep", "0")
        if depth not in ("0", "1"):
            raise BadRequest(f"'deep' is 0 or 1, not {depth[:40]!r}.", "deep", "invalid_value")
        is_deep = depth == "1"
        if is_deep:
            probe.require_admin(record_of(scope))
        if self._services.admission.takes_none:
            await send_body(send, 503, msgspec.json.encode(Health("draining")))
            return
        if is_deep:
            probed = await probe.examine(self._services, query.get("model"))
            await send_body(send, 200 if probed.status == "healthy" else 503, msgspec.json.encode(probed))
            return
        views = self._services.pool.workers()
        broken = [view for view in views if view.state in BROKEN]
        notes = _notes(views, scope, self._services) or UNSET
        is_store_damaged = self._services.metrics.store_problems["damaged"] > 0
        if not broken and not is_store_damaged:
            await send_body(send, 200, msgspec.json.encode(Health("healthy", notes=notes)))
            return
        can_serve = not broken or len(broken) < len(views)
        reasons = _describe(broken, scope, self._services)
        if is_store_damaged and record_of(scope).caller is not NOBODY:
            reasons.append(_STORE_DAMAGED)
        body = Health("degraded" if can_serve else "unhealthy", reasons, notes)
        await send_body(send, 200 if can_serve else 503, msgspec.json.encode(body))


class Scrape:
    """Prometheus' text format."""

    def __init__(self, services: Services) -> None:
        self._text = ScrapeText(services.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, await self._text.read(), kind=CONTENT_TYPE_LATEST.encode())


class Root:
    """A friendly answer at `/`; on Ollama's port the one that its clients look for."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if came_to(scope, self._services.config.server.ollama_port):
            await send_body(send, 200, OLLAMA_RUNNING, kind=b"text/plain; charset=utf-8")
            return
        models = record_of(scope).caller.usable(self._services.config.models.values())
        about = AboutEndpoint(protocol.__version__, [model.name for model in models])
        await send_body(send, 200, msgspec.json.encode(about))


def _describe(views: list[WorkerView], scope: Scope, services: Services) -> list[str]:
    """Reasons why models are not healthy, for those that the caller may use."""
    caller = record_of(scope).caller
    return [_reason(view, caller.is_admin) for view in views if caller.may_use(services.config.models[view.name])]


def _notes(views: list[WorkerView], scope: Scope, services: Services) -> list[str]:
    """Slower batch modes that keep results exact, for those that the caller may use."""
    caller = record_of(scope).caller
    reasons = [(view.name, view.ready.batch_mode_reason) for view in views if view.ready is not None]
    return [f"{name}: {why}" for name, why in reasons if why and caller.may_use(services.config.models[name])]


def _reason(view: WorkerView, is_operator: bool) -> str:
    # One that drains was ready: what failed is a predecessor of its.
    failure = None if view.state is State.DRAINING else view.last_failure
    cause = f": {message_of(failure, is_operator)}" if failure is not None else ""
    return f"model {view.name} is {view.state}{cause}"
