"""The two ASGI apps: the public one over TCP, the admin one over a unix socket."""

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api import admin, health
from gateway.api.chat import ChatCompletions
from gateway.api.completions import Completions
from gateway.api.messages import CountTokens, Messages
from gateway.api.models import Models, OneModel
from gateway.api.tokenize import DetokenizeIds, TokenizeText
from gateway.config import Config
from gateway.link import Link
from gateway.metrics import Metrics
from gateway.middleware import Entry
from gateway.pool.pool import Pool
from gateway.services import Services


class App:
    """An ASGI app with its parts. `drain` makes it refuse new generations; what runs goes on."""

    def __init__(self, services: Services, routes: list[Route], is_public: bool = True) -> None:
        self.services = services
        router = Router(routes, redirect_slashes=False)
        self._entry: ASGIApp = Entry(router, services.metrics, is_public)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._entry(scope, receive, send)

    def drain(self) -> None:
        """From now on new generations get a 503, and `/readyz` says so."""
        self.services.admission.is_draining = True


def create_app(config: Config, pool: Pool, link: Link, metrics: Metrics) -> App:
    """The public app."""
    services = Services.make(config, pool, link, metrics)
    models = Models(services)
    healthy = health.Healthy(services)
    return App(
        services,
        [
            Route("/v1/chat/completions", ChatCompletions(services), methods=["POST"]),
            Route("/v1/completions", Completions(services), methods=["POST"]),
            Route("/v1/messages", Messages(services), methods=["POST"]),
            Route("/v1/messages/count_tokens", CountTokens(services), methods=["POST"]),
            Route("/tokenize", TokenizeText(services), methods=["POST"]),
            Route("/detokenize", DetokenizeIds(services), methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{id:path}", OneModel(services, models), methods=["GET"]),
            Route("/livez", health.Live(), methods=["GET"]),
            Route("/readyz", health.Readiness(services), methods=["GET"]),
            Route("/health", healthy, methods=["GET"]),
            Route("/healthz", healthy, methods=["GET"]),
            Route("/metrics", health.Scrape(services), methods=["GET"]),
            Route("/", health.Root(services), methods=["GET"]),
        ],
    )


def create_admin_app(config: Config, pool: Pool, link: Link, metrics: Metrics, *, public: App | None = None) -> App:
    """The admin app. Whoever can open its socket may do everything. It shows the queues of `public`."""
    services = public.services if public is not None else Services.make(config, pool, link, metrics)
    return App(
        services,
        [
            Route("/v1/status", admin.StatusEndpoint(services), methods=["GET"]),
            Route("/v1/models/load", admin.Command(services, pool.load), methods=["POST"]),
            Route("/v1/models/unload", admin.Command(services, pool.unload), methods=["POST"]),
            Route("/v1/models/restart", admin.Command(services, pool.restart), methods=["POST"]),
        ],
        is_public=False,
    )
