"""The two ASGI apps: the public one over TCP, the admin one over a unix socket."""

import asyncio
import time
from collections.abc import Awaitable, Callable

import httpx2
from starlette.routing import Route, Router, WebSocketRoute
from starlette.types import ASGIApp

from gateway.api import routes
from gateway.api.batches import batches
from gateway.api.batches.batches import Batches
from gateway.api.common.catalog import Catalog
from gateway.api.decisions.openai import decisions
from gateway.api.endpoint_makers import HandlerEndpoint, Parts
from gateway.api.openai.chat_and_completions import ChatCompletions
from gateway.api.openai.embeddings import Embeddings
from gateway.api.responses.endpoints import Responses
from gateway.api.responses.socket_turn import PATH as RESPONSES
from gateway.api.system import health
from gateway.api.system.warm_up import WarmUp
from gateway.config.origins import is_loopback
from gateway.config.settings import Config
from gateway.control import endpoints
from gateway.control.commands import AuditedCommand
from gateway.disk_and_clock import SYSTEM_DISK, Disk, MakeThread, single_thread
from gateway.http.websocket import WebSocketRules
from gateway.link.link import WorkerLink
from gateway.middleware.auth import Auth, BatchClient, TrustedClient
from gateway.middleware.cors import Cors
from gateway.middleware.entry import EntryMiddleware
from gateway.reload import Reloader
from gateway.services import Services, SpanTracer
from gateway.telemetry.metrics import Metrics
from gateway.web.backend import Backend
from gateway.web.page import Site
from gateway.workers.pool import AppliedConfig, Pool
from gateway.workers.supervisor.state import State


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
        wall: Callable[[], float] = time.time,
        make_thread: MakeThread = single_thread,
        disk: Disk = SYSTEM_DISK,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        """Make the app. Raises `KeysUnusable` and `CertificateUnusable`.

        `clock` measures requests. `wall` measures background responses, which a later daemon may resume.
        `transport` replaces the connections to upstreams.
        """
        tracer = _tracer(config.server.otlp_endpoint)
        self.services = Services.make(config, pool, link, metrics, tracer, clock, make_thread, disk, transport)
        self.backend = Backend(self.services)
        self._responses = Responses(self.services, config, wall, make_thread, disk)
        self.batches = Batches(self.services, config, wall, make_thread, disk)
        self.warm_up = WarmUp(self.services)
        pool.on_state = self._on_state
        parts = Parts(self.services, Catalog(self.services), self._responses, self.backend.downloads, self.batches)
        self.routes = [*routes.routes(parts)]
        sockets = [WebSocketRoute(RESPONSES, HandlerEndpoint(Responses.connect, self._responses))]
        router = Router([*self.routes, *sockets], redirect_slashes=False)
        self._batched = EntryMiddleware(BatchClient(router), self.services, is_public=True)
        guarded = _guarded(router, self.services, self.backend)
        # ASGI app of the public listener.
        self.entry = EntryMiddleware(guarded, self.services, is_public=True, unversioned=routes.UNVERSIONED)

    @property
    def websockets(self) -> WebSocketRules:
        """Rules of the public listener's WebSockets."""
        services = self.services
        paths = (RESPONSES, RESPONSES.removeprefix("/v1"))
        return WebSocketRules(
            frozenset(path.encode() for path in paths),
            lambda: services.config.server.max_body_bytes,
            services.bodies.lease,
        )

    async def start(self) -> None:
        """Resume the background responses and batches of an earlier daemon. Call it after the pool has started, before
        serving.
        """
        await self._responses.resume()
        await self.batches.start(self._batched)

    def _on_state(self, model: str, state: State) -> None:
        self.services.next_turns.on_state(model, state)
        self.warm_up.on_state(model, state)

    def drain(self) -> None:
        """Refuse new generations with status 503. `/readyz` then answers 503 too. WebSockets are closed when their
        responses have ended.
        """
        self.services.admission.is_draining = True
        self.warm_up.stop()
        self.services.next_turns.stop()
        self.batches.leave()
        self._responses.drain()

    def leave(self) -> None:
        """Leave background responses to the next daemon, which resumes them. Call it after `drain`."""
        self._responses.leave()

    async def stop(self, drain_s: float) -> None:
        """Let running requests finish until the deadline, and stop the workers. Call it after `drain`."""
        services = self.services
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(services.pool.stop(drain_s))
            tasks.create_task(services.upstreams.drain(drain_s))

    async def hand_over(self, drain_s: float, impatience: asyncio.Task[object]) -> None:
        """Let running requests finish until the deadline or the end of `impatience`, and leave the workers and the
        background responses to the next daemon. Call it after `drain`.
        """
        services = self.services
        self.leave()
        # Answers of upstreams must finish first, because only this process can relay them to clients.
        elsewhere = asyncio.create_task(services.upstreams.drain(drain_s))
        try:
            await services.pool.release(drain_s, impatience)
            await asyncio.wait({impatience, elsewhere}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            impatience.cancel()
            elsewhere.cancel()

    def apply(self, config: Config) -> AppliedConfig:
        """Apply a configuration immediately. Running requests keep the settings with which they began."""
        self.services.live.apply(config)
        self.services.metrics.declare(config.models)
        self._responses.apply(config.server)
        return self.services.pool.apply(config)

    async def finish(self, timeout_s: float) -> None:
        """End tasks and connections that outlive their request. Call it after the pool has ended and before `close`."""
        await self.backend.close()
        await self.services.tasks.finish(timeout_s)
        await self.services.upstreams.close()

    def close(self) -> None:
        """Finish writing files. No method may be called after this."""
        self._responses.close()
        self.batches.close()
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
        *endpoints.request_routes(services),
        *batches.routes(public.batches),
        *endpoints.adapter_routes(services, reloader),
        *public.backend.entrance.socket_routes(lambda: url),
        Route("/healthz", HandlerEndpoint(health.health, services), methods=["GET"]),
        # `mlxctl chat`, `bench` and `decide` need no key, because the owner of the socket owns the models.
        Route("/v1/chat/completions", ChatCompletions(services), methods=["POST"]),
        Route("/v1/embeddings", Embeddings(services), methods=["POST"]),
        Route("/v1/decisions", HandlerEndpoint(decisions, services), methods=["POST"]),
    ]
