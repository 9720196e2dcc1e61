"""Routing: from the name that a client sends to a model, with its defaults from a profile and the model's own files."""

from collections.abc import Mapping

from gateway.access.caller import Caller
from gateway.config.address import Proxies
from gateway.config.names import Found, Names
from gateway.config.settings import Config, ModelConfig
from gateway.request.defaults import Defaults


class Router:
    """The names of one configuration, for callers."""

    def __init__(self, models: Mapping[str, ModelConfig], default: str = "", small: str = "") -> None:
        """`default` and `small` are names that a client could ask for, or empty."""
        self._names = Names(models, default, small)
        self._defaults = Defaults()

    @classmethod
    def of(cls, config: Config) -> "Router":
        return cls(config.models, config.server.default, config.server.small)

    def resolve(self, name: str, caller: Caller) -> ModelConfig:
        """The model behind `name`, its defaults filled in from the profile and the model's own files.

        Raises `ModelNotFound`, for a model that `caller` may not use just as for none, and `BadRequest` without a name.
        """
        return self.filled(self.locate(name, caller))

    def filled(self, target: Found) -> ModelConfig:
        """A model with the defaults of a request that names it so."""
        return self._defaults.of(target.model, target.profile)

    def locate(self, name: str, caller: Caller) -> Found:
        """Like `resolve`, with the model as it is configured."""
        return self._names.locate(name, caller.may_use)


class Live:
    """The configuration in force, with its names. A reload replaces it as a whole, between two steps of the event loop.

    A request takes from it once what it needs, so that it keeps what it began with.
    """

    __slots__ = ("config", "proxies", "router")

    def __init__(self, config: Config) -> None:
        self.apply(config)

    def apply(self, config: Config) -> None:
        self.config = config
        self.router = Router.of(config)
        self.proxies = Proxies(config.server.trusted_proxies)
