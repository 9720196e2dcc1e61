"""Routing: from the name that a client sends to a model, with its defaults from a profile and the model's own files."""

from collections.abc import Callable, Mapping

from gateway.access.caller import Caller
from gateway.config.address import Proxies
from gateway.config.names import LATEST, Names, ResolvedName
from gateway.config.settings import Config, ModelConfig
from gateway.errors import ModelNotFound
from gateway.request.defaults import Defaults


def _nowhere(name: str) -> ModelConfig | None:
    return None


class Router:
    """The names of one configuration, for callers."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        default: str = "",
        small: str = "",
        elsewhere: Callable[[str], ModelConfig | None] = _nowhere,
    ) -> None:
        """`default` and `small` are names that a client could ask for, or empty; `elsewhere` finds models of peers."""
        self._names = Names(models, default, small)
        self._defaults = Defaults()
        self._elsewhere = elsewhere

    @classmethod
    def of(cls, config: Config, elsewhere: Callable[[str], ModelConfig | None] = _nowhere) -> "Router":
        return cls(config.models, config.server.default, config.server.small, elsewhere)

    def resolve(self, name: str, caller: Caller) -> ModelConfig:
        """The model behind `name`, its defaults filled in from the profile and the model's own files.

        Raises `ModelNotFound`, for a model that `caller` may not use just as for none, and `BadRequest` without a name.
        """
        return self.filled(self.locate(name, caller))

    def filled(self, target: ResolvedName) -> ModelConfig:
        """A model with the defaults of a request that names it so."""
        if not target.model.path:  # a peer has filled in its own
            return target.model
        return self._defaults.of(target.model, target.profile)

    def locate(self, name: str, caller: Caller) -> ResolvedName:
        """Like `resolve`, with the model as it is configured. A name of this daemon comes before one of a peer."""
        try:
            return self.locate_here(name, caller)
        except ModelNotFound:
            model = self._elsewhere(name) or self._elsewhere(name.removesuffix(f":{LATEST}"))
            if model is None or not caller.may_use(model):
                raise
            return ResolvedName(model)

    def resolve_here(self, name: str, caller: Caller) -> ModelConfig:
        """Like `resolve`, of the models of this daemon only."""
        return self.filled(self.locate_here(name, caller))

    def locate_here(self, name: str, caller: Caller) -> ResolvedName:
        """Like `locate`, of the models of this daemon only."""
        return self._names.locate(name, caller.may_use)


class LiveConfig:
    """The configuration in force, with its names. A reload replaces it as a whole, between two steps of the event loop.

    A request takes from it once what it needs, so that it keeps what it began with.
    """

    __slots__ = ("_elsewhere", "config", "proxies", "router")

    def __init__(self, config: Config) -> None:
        self._elsewhere: Callable[[str], ModelConfig | None] = _nowhere
        self.apply(config)

    def look_elsewhere(self, find: Callable[[str], ModelConfig | None]) -> None:
        """Find with `find` the models of peers behind names that no model of the configuration has."""
        self._elsewhere = find
        self.apply(self.config)

    def apply(self, config: Config) -> None:
        self.config = config
        self.router = Router.of(config, self._elsewhere)
        self.proxies = Proxies(config.server.trusted_proxies)
