"""Server side of the page: its gate, its routes, its feed and its downloads, made once for an app."""

from typing import Final

import msgspec
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.control import endpoints as admin
from gateway.control import requests
from gateway.control.commands import AuditedCommand
from gateway.http.exchange import send_body
from gateway.reload import Reloader
from gateway.services import Services
from gateway.web import hub_routes, key_routes, model_orders, pulls
from gateway.web.charts import Sampler
from gateway.web.config_routes import Configuration
from gateway.web.connect_routes import Connect
from gateway.web.entrance import LogInOrOut, WhoAmI, session_of
from gateway.web.feed import Feed
from gateway.web.gate import Gate
from gateway.web.log_lines import LogsEndpoint
from gateway.web.session import Sessions
from gateway.web.site import LOG_IN, ME

PREFIX: Final = "/ui/api"


class Backend:
    """Part of the public app that serves the page. `routes` are all routes of `/ui/api`."""

    def __init__(self, services: Services) -> None:
        self.gate = Gate(Sessions(), services.live, services.throttle, services.metrics)
        self.me: ASGIApp = WhoAmI(services)
        self.sampler = Sampler(services)
        self.downloads = pulls.PullQueue(services)
        status = admin.StatusEndpoint(services)
        self.feed = Feed(services, status.status, self.sampler, self.downloads, self.gate.sessions)
        self._configuration = Configuration(services)
        self.routes = [
            Route(LOG_IN, LogInOrOut(services, self.gate), methods=["POST", "DELETE"]),
            Route(ME, self.me, methods=["GET"]),
            Route(f"{PREFIX}/status", status, methods=["GET"]),
            Route(f"{PREFIX}/usage", admin.UsageByDay(services), methods=["GET"]),
            Route(f"{PREFIX}/history", HistoryEndpoint(self.sampler), methods=["GET"]),
            Route(f"{PREFIX}/logs", LogsEndpoint(services), methods=["GET"]),
            Route(f"{PREFIX}/connect", Connect(services), methods=["GET"]),
            Route(f"{PREFIX}/feed", self.feed, methods=["GET"]),
            *requests.routes(services, PREFIX),
            *model_orders.routes(services, PREFIX),
            *hub_routes.routes(services, PREFIX),
            *pulls.routes(self.downloads, PREFIX),
            *self._configuration.routes(PREFIX),
            *key_routes.routes(services, PREFIX),
        ]
        router = Router(self.routes, redirect_slashes=False)
        self.api: ASGIApp = AuditedCommand(router, services.audit, lambda scope: session_of(scope).id)

    def read_with(self, reloader: Reloader) -> None:
        """Enable the page to check and reload the configuration."""
        self._configuration.reloader = reloader

    async def close(self) -> None:
        """End every stream and download when the daemon ends."""
        self.feed.close()
        await self.downloads.close()


class HistoryEndpoint:
    """`GET /ui/api/history`."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, 200, msgspec.json.encode(self._sampler.charts()))
