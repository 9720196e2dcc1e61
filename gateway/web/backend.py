"""Everything behind the page: its gate, its routes, its feed and its downloads, made once for an app."""

from starlette.routing import Route, Router
from starlette.types import ASGIApp

from gateway.admin import endpoints as admin
from gateway.admin import requests
from gateway.admin.orders import Audited
from gateway.services import Services
from gateway.web.entrance import LogInOrOut, WhoAmI, session_of
from gateway.web.gate import Gate
from gateway.web.session import Sessions
from gateway.web.site import LOG_IN, ME

PREFIX = "/ui/api"


class Backend:
    """Part of the public app. `routes` are all those of `/ui/api`."""

    def __init__(self, services: Services) -> None:
        self.gate = Gate(Sessions(), services.live, services.throttle, services.metrics)
        self.me: ASGIApp = WhoAmI(services)
        self.routes = [
            Route(LOG_IN, LogInOrOut(services, self.gate), methods=["POST", "DELETE"]),
            Route(ME, self.me, methods=["GET"]),
            *requests.routes(services, PREFIX),
            Route(f"{PREFIX}/status", admin.StatusEndpoint(services), methods=["GET"]),
            Route(f"{PREFIX}/usage", admin.UsageByDay(services), methods=["GET"]),
        ]
        router = Router(self.routes, redirect_slashes=False)
        self.api: ASGIApp = Audited(router, services.audit, lambda scope: session_of(scope).id)
