"""The two ASGI apps: the public one over TCP, the admin one over a unix socket."""

import time
from collections.abc import Awaitable, Callable

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import routes
from gateway.api.common.catalog import Catalog
from gateway.api.openai.chat import ChatCompletions
from gateway.api.openai.embeddings import Embeddings
from gateway.api.parts import HandlerEndpoint, Parts
from gateway.api.responses.endpoints import Responses
from gateway.api.system import health
from gateway.config.origins import is_loopback
from gateway.config.settings import Config
from gateway.control import adapter_endpoints, endpoints, requests
from gateway.control.commands import AuditedCommand
from gateway.link.link import WorkerLink
from gateway.middleware.auth import Auth
from gateway.middleware.cors import Cors
from gateway.middleware.entry import EntryMiddleware
from gateway.middleware.socket_auth import TrustedClient
from gateway.reload import Reloader
from gateway.remote.peer_api import peer_requests
from gateway.services import Services, SpanTracer
from gateway.telemetry.metrics import Metrics
from gateway.web.backend import Backend
from gateway.web.site import Site
from gateway.workers.pool.pool import AppliedConfig, Pool


class App:
    """The public ASGI app with its parts. After `drain`, it refuses new generations; running ones continue."""

    def __init__(
        self,
        config: Config,
        pool: Pool,
        link: WorkerLink,
        metrics: Metrics,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Make the app. Raises `KeysUnusable` and `CertificateUnusable`."""
        self.services = Services.make(config, pool, link, metrics, _tracer(config.server.otlp_endpoint), clock)
        self.backend = Backend(self.services)
        self._responses = Responses(self.services, config)
        parts = Parts(self.services, Catalog(self.services), self._responses, self.backend.downloads)
        self.routes = [*routes.routes(parts), *peer_requests.routes(self.services)]
        router = Router(self.routes, redirect_slashes=False)
        self._entry = EntryMiddleware(_guarded(router, self.services, self.backend), self.services, is_public=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    async def start(self) -> None:
        """Resume the background responses of an earlier daemon. Call it after the pool has started, before serving."""
        await self._responses.resume()

    def drain(self) -> None:
        """Refuse new generations with status 503. `/readyz` then answers 503 too."""
        self.services.admission.is_draining = True

    def leave(self) -> None:
        """Leave background responses to the next daemon, which resumes them. Call it after `drain`."""
        self._responses.leave()

    def apply(self, config: Config) -> AppliedConfig:
        """Apply a configuration immediately. Running requests keep the settings with which they began."""
        self.services.live.apply(config)
        self.services.metrics.declare(config.models)
        self._responses.apply(config.server)
        self.services.fleet.apply(config)
        return self.services.pool.apply(config)

    async def finish(self, timeout_s: float) -> None:
        """End tasks and connections that outlive their request. Call it after the pool has ended and before `close`."""
        await self.backend.close()
        await self.services.tasks.finish(timeout_s)
        await self.services.fleet.close()
        await self.services.upstreams.close()

    def close(self) -> None:
        """Finish writing files. No method may be called after this."""
        self._responses.close()
        self.services.close()


def _guarded(app: ASGIApp, services: Services, backend: Backend) -> ASGIApp:
    """Wrap the public app in its middleware. The web page has its own; all other paths have authentication and CORS."""
    # The address cannot change in a running daemon.
    is_local = is_loopback(services.config.server.host)

    def auth(inner: ASGIApp) -> ASGIApp:
        throttle, addresses, metrics = services.throttle, services.addresses, services.metrics
        keyring, live = services.keyring, services.live
        return Auth(inner, keyring, throttle, addresses, metrics, live, backend.gate, is_loopback=is_local)

    return Site(Cors(auth(app), services.live), backend.api, auth(backend.me), backend.gate, services.live)


def _tracer(endpoint: str) -> SpanTracer | None:
    if not endpoint:
        return None
    # OpenTelemetry is an extra, and takes a third of a second to import.
    from gateway.middleware import otel

    return otel.OtelTracer(endpoint)


def create_admin_app(
    public: App, reloader: Reloader, url: str, drain: Callable[[float | None], Awaitable[int]]
) -> ASGIApp:
    """Make the admin app for a public app that listens at `url`. Clients of the admin socket may do everything."""
    router = Router(admin_routes(public, reloader, url, drain), redirect_slashes=False)
    services = public.services
    return EntryMiddleware(TrustedClient(AuditedCommand(router, services.audit)), services, is_public=False)


def admin_routes(
    public: App, reloader: Reloader, url: str, drain: Callable[[float | None], Awaitable[int]]
) -> list[Route]:
    services = public.services
    return [
        *endpoints.routes(services, reloader, url, drain),
        *requests.routes(services),
        *adapter_endpoints.routes(services, reloader),
        *public.backend.entrance.socket_routes(lambda: url),
        Route("/healthz", HandlerEndpoint(health.health, services), methods=["GET"]),
        # `mlxctl chat` and `bench` need no key, because the owner of the socket owns the models.
        Route("/v1/chat/completions", ChatCompletions(services), methods=["POST"]),
        Route("/v1/embeddings", Embeddings(services), methods=["POST"]),
    ]
