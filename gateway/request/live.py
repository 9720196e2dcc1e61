"""The configuration in force."""

from gateway.config.address import Proxies
from gateway.config.settings import Config
from gateway.request.routing import Router


class Live:
    """A reload replaces it as a whole, between two steps of the event loop.

    Whoever serves a request takes from it once what that request needs, so that what runs keeps what it began with.
    """

    __slots__ = ("config", "proxies", "router")

    def __init__(self, config: Config) -> None:
        self.apply(config)

    def apply(self, config: Config) -> None:
        self.config = config
        self.router = Router.of(config)
        self.proxies = Proxies(config.server.trusted_proxies)
