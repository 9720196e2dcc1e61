"""Server side of the web page: its gate, its routes, its feed and its downloads. Each app has one."""

from functools import cached_property, partial
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router, request_response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.control import endpoints as admin
from gateway.control import requests
from gateway.control.commands import AuditedCommand
from gateway.control.json_endpoint import get
from gateway.http.exchange import json_response
from gateway.model_files.pull_queue import PullQueue
from gateway.reload import Reloader
from gateway.services import Services
from gateway.state_dir.home_paths import sessions_path
from gateway.web import model_orders
from gateway.web.charts import Sampler
from gateway.web.config_routes import Configuration
from gateway.web.connect_routes import client_setup
from gateway.web.entrance import Entrance, session_of
from gateway.web.feed import Feed
from gateway.web.gate import Gate
from gateway.web.hub_routes import ModelFinder
from gateway.web.key_routes import Keys
from gateway.web.log_lines import list_log_lines
from gateway.web.session import Sessions
from gateway.web.session_file import SessionFile
from gateway.web.site import LOG_IN, ME

PREFIX: Final = "/ui/api"


class Backend:
    """The part of the public app that serves the web page."""

    def __init__(self, services: Services) -> None:
        file = SessionFile(sessions_path(services.config.home))
        self.gate = Gate(Sessions(file.read()), services.live, services.throttle, services.metrics)
        self.entrance = Entrance(services, self.gate, file)
        self.me: ASGIApp = request_response(self.entrance.show_visitor)
        self.sampler = Sampler(services)
        self.downloads = PullQueue(services.tasks, services.config.home)
        self._daemon = admin.DaemonEndpoints(services)
        self.feed = Feed(services, self._daemon.status, self.sampler, self.downloads, self.gate.sessions)
        self._services = services
        self._configuration = Configuration(services)

    async def api(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.entrance.save_uses()
        await self._router(scope, receive, send)

    @cached_property
    def _router(self) -> ASGIApp:
        router = Router(self.routes, redirect_slashes=False)
        return AuditedCommand(router, self._services.audit, lambda scope: session_of(scope).id)

    @cached_property
    def routes(self) -> list[Route]:
        """Routes of `/ui/api`. They are made at the first request of a page: many daemons never get one."""
        services = self._services
        return [
            Route(LOG_IN, self.entrance.log_in_or_out, methods=["POST", "DELETE"]),
            Route(ME, self.entrance.show_visitor, methods=["GET"]),
            get(f"{PREFIX}/status", self._daemon.show_status),
            get(f"{PREFIX}/usage", self._daemon.usage_by_day),
            Route(f"{PREFIX}/history", self._show_history, methods=["GET"]),
            Route(f"{PREFIX}/logs", partial(list_log_lines, services), methods=["GET"]),
            Route(f"{PREFIX}/connect", partial(client_setup, services), methods=["GET"]),
            Route(f"{PREFIX}/feed", self.feed, methods=["GET"]),
            *requests.routes(services, PREFIX),
            *model_orders.routes(services, PREFIX),
            *ModelFinder(services, self.downloads).routes(PREFIX),
            *self._configuration.routes(PREFIX),
            *Keys(services).routes(PREFIX),
        ]

    def read_with(self, reloader: Reloader) -> None:
        """Set the reloader with which the page checks and reloads the configuration."""
        self._configuration.reloader = reloader

    async def close(self) -> None:
        """End every stream and download when the daemon ends."""
        self.feed.close()
        await self.downloads.close()

    async def _show_history(self, request: Request) -> Response:
        return json_response(self.sampler.charts())
