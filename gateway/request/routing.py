"""Routing: resolves the model name in a request to a model, with defaults from the profile and the model's
own files.
"""

from collections.abc import Callable, Mapping

from gateway.access.caller import Caller
from gateway.config.address import Proxies
from gateway.config.names import Names, ResolvedName
from gateway.config.settings import Config, ModelConfig
from gateway.request.defaults import Defaults


class Router:
    """Resolves model names by one configuration."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        default: str = "",
        small: str = "",
        ready_epoch: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`default` and `small` are names of models, or empty."""
        self._names = Names(models, default, small)
        self._defaults = Defaults(ready_epoch)

    def resolve(self, name: str, caller: Caller) -> ModelConfig:
        """Return the model with this name, with defaults from the profile and the model's own files.

        Raises `ModelNotFound`, also if `caller` may not use the model, and `BadRequest` if the name is missing.
        """
        return self.filled(self.locate(name, caller))

    def filled(self, target: ResolvedName) -> ModelConfig:
        """Return a model with the defaults of the profile in its name. An upstream's model has none here."""
        if not target.model.path:
            return target.model
        return self._defaults.of(target.model, target.profile)

    def locate(self, name: str, caller: Caller) -> ResolvedName:
        """Resolve a name, without adding defaults."""
        return self._names.locate(name, caller.may_use)


class LiveConfig:
    """Current configuration with its router. A reload replaces both together, between two steps of the event loop.

    A request reads each value only once, so that a reload does not change the value midway.
    """

    __slots__ = ("_ready_epoch", "config", "proxies", "router")

    def __init__(self, config: Config, ready_epoch: Callable[[str], int] = lambda _: 0) -> None:
        """`ready_epoch` returns the epoch of a model's worker while it is ready, else 0."""
        self._ready_epoch = ready_epoch
        self.apply(config)

    def apply(self, config: Config) -> None:
        self.config = config
        server = config.server
        self.router = Router(config.models, server.default, server.small, self._ready_epoch)
        self.proxies = Proxies(config.server.trusted_proxies)
