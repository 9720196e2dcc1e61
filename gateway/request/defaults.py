"""Sampling and thinking defaults of a request. The profile's come first, then those of the model's table, then those of
`generation_config.json`.
"""

import json
import logging
import time
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.config.settings import ModelConfig, ProfileConfig, SamplingDefaults
from gateway.model_files.metadata import Unreadable, find

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Struct)

# These sampling fields are read from `generation_config.json`; vLLM reads the same.
SAMPLING_FIELDS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# If a model has no files, its defaults are read again after this time, because it may have been downloaded meanwhile.
MISSING_RETRY_S: Final = 5.0
_NO_PROFILE: Final = ProfileConfig()


class Defaults:
    """Caches models with their defaults. Values from a model's folder are kept until the next configuration."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], ModelConfig] = {}
        self._retry_at: dict[tuple[str, str], float] = {}

    def of(self, model: ModelConfig, profile: str = "") -> ModelConfig:
        """Return `model` with the defaults of `profile`, or with its own if there is no such profile."""
        key = (model.full_name, profile)
        known = self._known.get(key)
        if known is not None and time.monotonic() < self._retry_at.get(key, float("inf")):
            return known
        own = recommended(model.path)
        if own is None:
            self._retry_at[key] = time.monotonic() + MISSING_RETRY_S
        else:
            self._retry_at.pop(key, None)
        chosen = model.profiles.get(profile, _NO_PROFILE)
        configured = over(chosen.sampling, model.sampling)
        self._known[key] = filled = msgspec.structs.replace(
            model,
            sampling=configured if own is None else over(configured, own),
            thinking=over(chosen.thinking, model.thinking),
        )
        return filled


def recommended(path: str) -> SamplingDefaults | None:
    """Return the sampling in a model's `generation_config.json`. None if the model is not on this machine."""
    try:
        folder = find(path)
    except Unreadable:
        return None
    if not folder.is_dir():
        return None
    try:
        content = json.loads((folder / "generation_config.json").read_bytes())
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, ValueError, RecursionError) as error:
        log.warning("%s/generation_config.json is not readable JSON and is not used: %s", folder, error)
        return SamplingDefaults()
    return _usable(content, str(folder)) if isinstance(content, dict) else SamplingDefaults()


def _usable(content: dict[str, Any], folder: str) -> SamplingDefaults:
    values = {name: content[name] for name in SAMPLING_FIELDS if content.get(name) is not None}
    try:
        return msgspec.convert(values, SamplingDefaults)
    except msgspec.ValidationError as error:
        log.warning("%s/generation_config.json is not used: %s", folder, error)
        return SamplingDefaults()


def over(stronger: T, weaker: T) -> T:
    """Return `stronger`, but with fields that are None taken from `weaker`."""
    pairs = ((name, getattr(stronger, name), getattr(weaker, name)) for name in stronger.__struct_fields__)
    return msgspec.structs.replace(stronger, **{name: other for name, own, other in pairs if own is None})
