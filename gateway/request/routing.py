"""Routing: resolves the model name in a request to a model, with defaults from the profile and the model's
own files.
"""

from collections.abc import Callable, Mapping

from gateway.access.caller import Caller
from gateway.config.address import Proxies
from gateway.config.names import LATEST, Names, ResolvedName
from gateway.config.settings import Config, ModelConfig
from gateway.errors import ModelNotFound
from gateway.request.defaults import Defaults

# Finds a model of the peers by its name.
PeerLookup = Callable[[str], ModelConfig | None]


class Router:
    """Resolves model names by one configuration."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        default: str = "",
        small: str = "",
        find_at_peers: PeerLookup = lambda _: None,
        ready_epoch: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """`default` and `small` are names of models, or empty."""
        self._names = Names(models, default, small)
        self._defaults = Defaults(ready_epoch)
        self._find_at_peers = find_at_peers

    def resolve(self, name: str, caller: Caller) -> ModelConfig:
        """Return the model with this name, with defaults from the profile and the model's own files.

        Raises `ModelNotFound`, also if `caller` may not use the model, and `BadRequest` if the name is missing.
        """
        return self.filled(self.locate(name, caller))

    def filled(self, target: ResolvedName) -> ModelConfig:
        """Return a model with the defaults of the profile in its name. A peer's model already has its defaults."""
        if not target.model.path:
            return target.model
        return self._defaults.of(target.model, target.profile)

    def locate(self, name: str, caller: Caller) -> ResolvedName:
        """Resolve a name, without adding defaults. Names of this daemon's models take precedence over names
        at peers.
        """
        try:
            return self.locate_here(name, caller)
        except ModelNotFound:
            model = self._find_at_peers(name) or self._find_at_peers(name.removesuffix(f":{LATEST}"))
            if model is None or not caller.may_use(model):
                raise
            return ResolvedName(model)

    def resolve_here(self, name: str, caller: Caller) -> ModelConfig:
        """Resolve the name of a model of this daemon."""
        return self.filled(self.locate_here(name, caller))

    def locate_here(self, name: str, caller: Caller) -> ResolvedName:
        """Resolve the name of a model of this daemon, without adding defaults."""
        return self._names.locate(name, caller.may_use)


class LiveConfig:
    """Current configuration with its router. A reload replaces both together, between two steps of the event loop.

    A request reads each value only once, so that a reload does not change the value midway.
    """

    __slots__ = ("_find_at_peers", "_ready_epoch", "config", "proxies", "router")

    def __init__(self, config: Config, ready_epoch: Callable[[str], int] = lambda _: 0) -> None:
        """`ready_epoch` returns the epoch of a model's worker while it is ready, else 0."""
        self._ready_epoch = ready_epoch
        self._find_at_peers: PeerLookup = lambda _: None
        self.apply(config)

    def find_at_peers(self, find: PeerLookup) -> None:
        """Use `find` for names that the configuration does not have."""
        self._find_at_peers = find
        self.apply(self.config)

    def apply(self, config: Config) -> None:
        self.config = config
        server = config.server
        self.router = Router(config.models, server.default, server.small, self._find_at_peers, self._ready_epoch)
        self.proxies = Proxies(config.server.trusted_proxies)
