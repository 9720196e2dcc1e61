"""The two ASGI apps: the public one over TCP, the admin one over a unix socket."""

from collections.abc import Awaitable, Callable

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.common.catalog import Catalog
from gateway.api.openai.chat import ChatCompletions
from gateway.api.openai.embeddings import Embeddings
from gateway.api.parts import Endpoint, Parts
from gateway.api.responses.endpoints import Responses
from gateway.api.system import health, operations
from gateway.config.origins import is_loopback
from gateway.config.settings import Config, url_of
from gateway.control import adapter_endpoints, requests
from gateway.control import endpoints as admin
from gateway.control.commands import AuditedCommand
from gateway.link.link import WorkerLink
from gateway.middleware.auth import Auth, TrustedClient
from gateway.middleware.cors import Cors
from gateway.middleware.entry import EntryMiddleware
from gateway.reload import Reloader
from gateway.remote.peer_api import peer_requests
from gateway.services import Services, SpanTracer
from gateway.telemetry.metrics import Metrics
from gateway.web.backend import Backend
from gateway.web.site import Site
from gateway.workers.pool.pool import AppliedConfig, Pool


class App:
    """An ASGI app with its parts. `drain` makes it refuse new generations; what runs goes on."""

    def __init__(
        self,
        services: Services,
        routes: list[Route],
        *,
        backend: Backend | None = None,
        responses: Responses | None = None,
    ) -> None:
        """The public app has a `backend` of its page; without one it is the admin app."""
        self.services = services
        self.backend = backend
        self._responses = responses
        self.routes = routes
        router = Router(routes, redirect_slashes=False)
        inner = (
            TrustedClient(AuditedCommand(router, services.audit))
            if backend is None
            else _guarded(router, services, backend)
        )
        self._entry: ASGIApp = EntryMiddleware(inner, services, backend is not None)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    async def start(self) -> None:
        """Go on with what an earlier daemon left. Before it serves, and once the pool has started."""
        if self._responses is not None:
            await self._responses.resume()

    def drain(self) -> None:
        """From now on new generations get a 503, and `/readyz` says so."""
        self.services.admission.is_draining = True

    def leave(self) -> None:
        """Leave to the next daemon what that can go on with, after `drain`: nobody need wait for it."""
        if self._responses is not None:
            self._responses.leave()

    def apply(self, config: Config) -> AppliedConfig:
        """Put a configuration into force, at once. Requests that run keep what they began with."""
        self.services.live.apply(config)
        self.services.metrics.declare(config.models)
        if self._responses is not None:
            self._responses.apply(config.server)
        self.services.fleet.apply(config)
        return self.services.pool.apply(config)

    async def finish(self, timeout_s: float) -> None:
        """End what outlives its request. Before `close`, once the pool has ended."""
        if self.backend is not None:
            await self.backend.close()
        await self.services.tasks.finish(timeout_s)
        await self.services.fleet.close()
        await self.services.upstreams.close()

    def close(self) -> None:
        """Finish writing what is kept. The last call."""
        if self._responses is not None:
            self._responses.close()
        self.services.close()


def _guarded(app: ASGIApp, services: Services, backend: Backend) -> ASGIApp:
    """Middleware of every public request: the page's own, or authentication and CORS."""
    # Where we listen is settled for good.
    is_local = is_loopback(services.config.server.host)

    def auth(inner: ASGIApp) -> ASGIApp:
        throttle, addresses, metrics = services.throttle, services.addresses, services.metrics
        keyring, live = services.keyring, services.live
        return Auth(inner, keyring, throttle, addresses, metrics, live, backend.gate, is_loopback=is_local)

    return Site(Cors(auth(app), services.live), backend.api, auth(backend.me), backend.gate, services.live)


def _services(config: Config, pool: Pool, link: WorkerLink, metrics: Metrics) -> Services:
    return Services.make(config, pool, link, metrics, _tracer(config.server.otlp_endpoint))


def _tracer(endpoint: str) -> SpanTracer | None:
    if not endpoint:
        return None
    # Only where it is wanted: OpenTelemetry is an extra, and takes a third of a second to import.
    from gateway.middleware import otel

    return otel.OtelTracer(endpoint)


def create_app(config: Config, pool: Pool, link: WorkerLink, metrics: Metrics) -> App:
    """The public app."""
    services = _services(config, pool, link, metrics)
    responses = Responses(services, config)
    backend = Backend(services)
    parts = Parts(services, Catalog(services), responses, backend.downloads)
    routes = [*operations.routes(parts), *peer_requests.routes(services)]
    return App(services, routes, backend=backend, responses=responses)


def create_admin_app(
    config: Config,
    pool: Pool,
    link: WorkerLink,
    metrics: Metrics,
    *,
    public: App | None = None,
    reloader: Reloader | None = None,
    url: str | None = None,
    drain: Callable[[float | None], Awaitable[int]] | None = None,
) -> App:
    """The admin app. Clients of its socket may do everything. It shows the queues of `public`, and `url`, where
    that really listens."""
    services = public.services if public is not None else _services(config, pool, link, metrics)
    reload: list[Route] = []
    if reloader is not None:
        reload = [
            Route("/v1/config/reload", admin.ReloadConfig(reloader), methods=["POST"]),
            *adapter_endpoints.routes(services, reloader),
        ]
    return App(
        services,
        [
            Route("/v1/status", admin.StatusEndpoint(services, url), methods=["GET"]),
            Route("/v1/route", admin.RouteOf(services), methods=["GET"]),
            Route("/v1/keys/usage", admin.KeyUsageEndpoint(services), methods=["GET"]),
            Route("/v1/usage", admin.UsageByDay(services), methods=["GET"]),
            Route("/healthz", Endpoint(health.health, services), methods=["GET"]),
            *requests.routes(services),
            # `mlxctl chat` and `bench` need no key: who owns the socket owns the models.
            Route("/v1/chat/completions", ChatCompletions(services), methods=["POST"]),
            Route("/v1/embeddings", Embeddings(services), methods=["POST"]),
            Route("/v1/models/load", admin.CommandEndpoint(services, pool.load, "model.load"), methods=["POST"]),
            Route("/v1/models/unload", admin.CommandEndpoint(services, pool.unload, "model.unload"), methods=["POST"]),
            Route(
                "/v1/models/restart", admin.CommandEndpoint(services, pool.restart, "model.restart"), methods=["POST"]
            ),
            Route("/v1/models/pin", admin.CommandEndpoint(services, pool.pin, "model.pin"), methods=["POST"]),
            Route("/v1/models/unpin", admin.CommandEndpoint(services, pool.unpin, "model.unpin"), methods=["POST"]),
            Route("/v1/undrain", admin.UndrainEndpoint(services), methods=["POST"]),
            *reload,
            *([] if drain is None else [Route("/v1/drain", admin.DrainEndpoint(drain, services), methods=["POST"])]),
            *_ui_routes(public, url),
        ],
    )


def _ui_routes(public: App | None, url: str | None) -> list[Route]:
    """Those by which the owner opens the page of the public app."""
    if public is None or public.backend is None:
        return []
    services = public.services
    return public.backend.entrance.socket_routes(lambda: url or url_of(services.config.server))
