"""The two ASGI apps: the public one over TCP, the admin one over a unix socket."""

from collections.abc import Awaitable, Callable

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.anthropic.endpoints import CountTokens, MessagesEndpoint
from gateway.api.common.catalog import Catalog
from gateway.api.compat.infill import FillMiddle
from gateway.api.compat.lm_studio import ListV0, ListV1
from gateway.api.compat.ollama_models import ListRunning, ListTags, OllamaVersion, ShowModel
from gateway.api.compat.props import ModelProps
from gateway.api.compat.scores import Rerank, ScorePairs
from gateway.api.compat.tokenize import DetokenizeIds, TokenizeText
from gateway.api.ollama import endpoints as ollama
from gateway.api.ollama.embed import Embed
from gateway.api.ollama.pull_stream import PullEndpoint
from gateway.api.ollama.refusals import REFUSED, Refusal
from gateway.api.openai.chat import ChatCompletions
from gateway.api.openai.completions import Completions
from gateway.api.openai.embeddings import Embeddings
from gateway.api.openai.speech import SpeechEndpoint
from gateway.api.openai.transcriptions import Transcriptions
from gateway.api.responses.endpoints import Responses
from gateway.api.system import health
from gateway.api.system.models import Models, OneModel
from gateway.api.system.operations import OpenApiDocument
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
from gateway.remote.upstreams.upstream import UpstreamFallback
from gateway.services import Services, SpanTracer
from gateway.telemetry.metrics import Metrics
from gateway.web import entrance
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
    catalog = Catalog(services)
    models = Models(catalog)
    backend = Backend(services)
    healthy = health.HealthResponse(services)

    def leaving(endpoint: ASGIApp, dialect: str) -> ASGIApp:
        return UpstreamFallback(endpoint, services, dialect)

    return App(
        services,
        [
            Route("/v1/chat/completions", leaving(ChatCompletions(services), "openai"), methods=["POST"]),
            Route("/v1/completions", leaving(Completions(services), "openai"), methods=["POST"]),
            Route("/v1/embeddings", Embeddings(services), methods=["POST"]),
            *_audio_routes(services),
            *(Route(path, Rerank(services), methods=["POST"]) for path in ("/v1/rerank", "/rerank", "/v2/rerank")),
            *(Route(path, ScorePairs(services), methods=["POST"]) for path in ("/v1/score", "/score")),
            Route("/v1/messages", leaving(MessagesEndpoint(services), "anthropic"), methods=["POST"]),
            Route("/v1/messages/count_tokens", CountTokens(services), methods=["POST"]),
            *responses.routes(),
            Route("/tokenize", TokenizeText(services), methods=["POST"]),
            Route("/detokenize", DetokenizeIds(services), methods=["POST"]),
            Route("/infill", FillMiddle(services), methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{id:path}", OneModel(catalog, models), methods=["GET"]),
            Route("/models", models, methods=["GET"]),
            Route("/props", ModelProps(services, catalog), methods=["GET"]),
            Route("/api/v0/models", ListV0(catalog), methods=["GET"]),
            Route("/api/v1/models", ListV1(catalog), methods=["GET"]),
            *_ollama_routes(services, catalog, backend),
            *peer_requests.routes(services),
            Route("/livez", health.LiveEndpoint(), methods=["GET"]),
            Route("/readyz", health.Readiness(services), methods=["GET"]),
            Route("/health", healthy, methods=["GET"]),
            Route("/healthz", healthy, methods=["GET"]),
            Route("/metrics", health.Scrape(services), methods=["GET"]),
            Route("/openapi.json", OpenApiDocument(), methods=["GET"]),
            Route("/", health.Root(services), methods=["GET"]),
        ],
        backend=backend,
        responses=responses,
    )


def _audio_routes(services: Services) -> list[Route]:
    return [
        Route("/v1/audio/transcriptions", Transcriptions(services, is_translated=False), methods=["POST"]),
        Route("/v1/audio/translations", Transcriptions(services, is_translated=True), methods=["POST"]),
        Route("/v1/audio/speech", SpeechEndpoint(services), methods=["POST"]),
    ]


def _ollama_routes(services: Services, catalog: Catalog, backend: Backend) -> list[Route]:
    return [
        Route("/api/chat", ollama.Chat(services), methods=["POST"]),
        Route("/api/generate", ollama.Complete(services), methods=["POST"]),
        Route("/api/embed", Embed(services, is_old=False), methods=["POST"]),
        Route("/api/embeddings", Embed(services, is_old=True), methods=["POST"]),
        Route("/api/tags", ListTags(catalog), methods=["GET"]),
        Route("/api/ps", ListRunning(services, catalog), methods=["GET"]),
        Route("/api/show", ShowModel(services, catalog), methods=["POST"]),
        Route("/api/version", OllamaVersion(), methods=["GET"]),
        Route("/api/pull", PullEndpoint(services, backend.downloads), methods=["POST"]),
        *(Route(path, Refusal(advice), methods=[method]) for method, path, advice in REFUSED),
    ]


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
            Route("/healthz", health.HealthResponse(services), methods=["GET"]),
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
    return entrance.socket_routes(public.backend.gate, services, lambda: url or url_of(services.config.server))
