"""Routing: resolves the model name in a request to a model, with defaults from the profile and the model's
own files, or to upstreams.

Sampling and thinking defaults of a request. The profile's come first, then those of the model's table, then those of
`generation_config.json`.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.access.caller import Caller
from gateway.config.address import Proxies
from gateway.config.names import Names, ResolvedName
from gateway.config.settings import Config, FallbackConfig, ModelConfig, ProfileConfig, SamplingDefaults, UpstreamConfig
from gateway.errors import ApiError, BadRequest, ModelNotFound, Overloaded
from gateway.model_files.metadata import Unreadable, find
from protocol.checkpoint import file_json

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Struct)

# These sampling fields are read from `generation_config.json`; vLLM reads the same.
SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_FILE: Final = "generation_config.json"
_NO_PROFILE: Final = ProfileConfig()

# Size and modification time of a file; None if there is no file.
_Stamp = tuple[int, int] | None


class Defaults:
    """Caches models with their defaults. `generation_config.json` is read again for each load of the model, as the
    worker reads the end-of-sequence tokens in it.
    """

    def __init__(self, ready_epoch: Callable[[str], int]) -> None:
        """`ready_epoch` returns the epoch of a model's worker while it is ready, else 0."""
        self._ready_epoch = ready_epoch
        # Each entry has the worker's epoch or, without a ready worker, the file's stamp.
        self._known: dict[tuple[str, str], tuple[int | _Stamp, ModelConfig]] = {}

    def of(self, model: ModelConfig, profile: str = "") -> ModelConfig:
        """Return `model` with the defaults of `profile`, or with its own if there is no such profile."""
        key, version = (model.full_name, profile), self._ready_epoch(model.name) or _stamp(model.path)
        known = self._known.get(key)
        if known is not None and known[0] == version:
            return known[1]
        chosen = model.profiles.get(profile, _NO_PROFILE)
        filled = msgspec.structs.replace(
            model,
            sampling=over(over(chosen.sampling, model.sampling), recommended(model.path)),
            thinking=over(chosen.thinking, model.thinking),
        )
        self._known[key] = version, filled
        return filled


def recommended(path: str) -> SamplingDefaults:
    """Return the sampling in a model's `generation_config.json`; no values if the model is not on this machine."""
    try:
        content = file_json(find(path) / _FILE)
    except (Unreadable, FileNotFoundError):
        return SamplingDefaults()
    except (OSError, ValueError) as error:
        log.warning("%s of %s is not readable JSON and is not used: %s", _FILE, path, error)
        return SamplingDefaults()
    return _usable(content, path) if isinstance(content, dict) else SamplingDefaults()


def _stamp(path: str) -> _Stamp:
    try:
        stat = (find(path) / _FILE).stat()
    except (Unreadable, OSError):
        return None
    return stat.st_size, stat.st_mtime_ns


def _usable(content: dict[str, Any], path: str) -> SamplingDefaults:
    """Return the sampling without values that no request may have, each of which is logged."""
    usable = SamplingDefaults()
    for name in SAMPLING_FIELDS:
        try:
            usable = over(usable, msgspec.convert({name: content.get(name)}, SamplingDefaults))
        except msgspec.ValidationError as error:
            log.warning("%s in %s of %s is not used: %s", name, _FILE, path, error)
    return usable


def over(stronger: T, weaker: T) -> T:
    """Return `stronger`, but with fields that are None taken from `weaker`."""
    pairs = ((name, getattr(stronger, name), getattr(weaker, name)) for name in stronger.__struct_fields__)
    return msgspec.structs.replace(stronger, **{name: other for name, own, other in pairs if own is None})


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
