"""Routing: resolves the model name in a request to a model, with defaults from the profile and the model's
own files, or to upstreams.
"""

from collections.abc import Callable, Mapping
from typing import Final

from gateway.access.caller import Caller
from gateway.config.address import Proxies
from gateway.config.names import Names, ResolvedName
from gateway.config.remote_settings import UpstreamConfig
from gateway.config.settings import Config, FallbackConfig, ModelConfig
from gateway.errors import ApiError, BadRequest, ModelNotFound, Overloaded
from gateway.request.defaults import Defaults

# A request that fails with one of these codes is never sent to an upstream.
_NO_FALLBACK_CODES: Final = frozenset({"draining", "cancelled", "body_memory_full"})


class Router:
    """Resolves model names by one configuration."""

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        default: str = "",
        small: str = "",
        ready_epoch: Callable[[str], int] = lambda _: 0,
        upstreams: Mapping[str, UpstreamConfig] | None = None,
    ) -> None:
        """`default` and `small` are names of models, or empty."""
        self._upstreams = upstreams or {}
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

    def upstreams_of(self, name: str, caller: Caller) -> list[UpstreamConfig]:
        """Return the upstreams that have a model which this daemon lacks. Empty if `caller` may not use a model of
        that name.
        """
        owners = [upstream for upstream in self._upstreams.values() if name in upstream.models]
        may_use = caller.may_use(ModelConfig(name=name, path=""))
        return owners if owners and may_use and self._local(name, caller) is None else []

    def fallback(self, name: str, caller: Caller, dialect: str, error: ApiError) -> tuple[str, list[UpstreamConfig]]:
        """Return the name of the model of this daemon that `name` stands for, and the upstreams to which a request in
        `dialect` that ended with `error` may be sent instead.
        """
        model = self._local(name, caller)
        # Upstreams do not have the weights of this daemon's adapters.
        if model is None or model.adapter or not caller.may_leave or not _is_fallback_case(model.fallback, error):
            return name, []
        named = [self._upstreams[upstream] for upstream in model.fallback.to]
        return model.name, [each for each in named if model.name in each.models and each.dialect == dialect]

    def _local(self, name: str, caller: Caller) -> ModelConfig | None:
        """Find a model of this daemon. None if the caller may use no model of that name."""
        try:
            return self.locate(name, caller).model
        except (ModelNotFound, BadRequest):
            return None


def _is_fallback_case(fallback: FallbackConfig, error: ApiError) -> bool:
    """Whether a request for the model may be sent to an upstream after this error."""
    if error.code in _NO_FALLBACK_CODES:
        return False
    is_queue = isinstance(error, Overloaded) or error.code == "queue_timeout"
    kinds = {
        "queue": is_queue,
        "context": error.code == "context_length_exceeded",
        "unavailable": error.status == 503 and not is_queue,
    }
    return any(kinds[when] for when in fallback.when)


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
        self.router = Router(config.models, server.default, server.small, self._ready_epoch, config.upstreams)
        self.proxies = Proxies(config.server.trusted_proxies)
