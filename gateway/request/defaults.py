"""Sampling and thinking defaults of a request. The profile's come first, then those of the model's table, then those of
`generation_config.json`.
"""

import logging
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.config.settings import ModelConfig, ProfileConfig, SamplingDefaults
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
