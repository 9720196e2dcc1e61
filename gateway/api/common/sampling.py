"""Sampling parameters that all dialects have. They come from the request, the model's configuration or the API's
default.
"""

from typing import Any, Final

from gateway.config.settings import SamplingDefaults

_NEUTRAL: Final[dict[str, float]] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def first(asked: float | None, configured: float | None, default: float) -> Any:
    """Return the requested value, or else the configured one, or else the API's default."""
    if asked is not None:
        return asked
    return default if configured is None else configured


def sampling_values(request: object, defaults: SamplingDefaults) -> dict[str, Any]:
    """Return the values of these parameters as fields of `protocol.Sampling`.

    A field that `request` does not have counts as not set.
    """
    values = {
        name: first(getattr(request, name, None), getattr(defaults, name), neutral)
        for name, neutral in _NEUTRAL.items()
    }
    return values | {"top_k": max(0, int(values["top_k"]))}
