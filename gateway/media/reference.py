"""References to media, as a request's parts give them: base64, a data URI or a URL, whose bytes are read later."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import BadRequest
from protocol.messages import Media

# The scheme of media that an earlier response of the same tenant has kept, by the digest of their bytes in hexadecimal.
STORED: Final = "mlxd-media:"
IMAGE: Final = "image"
VIDEO: Final = "video"
AUDIO: Final = "audio"
# What OpenAI's `detail` asks for, in pixels: a low one is a square of 512; the others are the model's own size.
DETAILS: Final[dict[str, dict[str, int | float]]] = {
    "low": {"max_pixels": 512 * 512},
    "auto": {},
    "high": {},
    "original": {},
}


class FetchFailed(Exception):
    """A URL could not be fetched; the reason, for the client."""


class TooManyBytes(FetchFailed):
    """There are more bytes behind a URL than a medium may have."""


class Reference(Media, frozen=True, array_like=True):
    """A medium without its bytes yet. One of `url`, which may be a data URI, and `encoded`, base64 alone, is set."""

    url: str = ""
    encoded: str = ""


def by_url(kind: str, url: str, param: str, options: Mapping[str, int | float] | None = None) -> dict[str, Any]:
    """The part of a message that shows the medium at a URL."""
    return {"type": kind, "media": Reference(kind, b"", b"", dict(options or {}), param, url=url)}


def by_base64(kind: str, encoded: str, param: str) -> dict[str, Any]:
    """The part of a message that shows the medium with these bytes."""
    if not encoded or encoded.startswith(STORED):
        return by_url(kind, encoded, param)
    return {"type": kind, "media": Reference(kind, b"", b"", {}, param, encoded=encoded)}


def stored_url(digest: bytes) -> str:
    """The URL under which a request of the same tenant may refer to bytes that were kept."""
    return STORED + digest.hex()


def detail_options(detail: str | None, param: str) -> dict[str, int | float]:
    """Options of an image for a `detail`. Raises `BadRequest`."""
    if detail is None:
        return {}
    if detail not in DETAILS:
        message = f"Invalid value for '{param}': {detail[:40]!r} is none of {', '.join(DETAILS)}."
        raise BadRequest(message, param, "invalid_value")
    return DETAILS[detail]


def merged(own: Mapping[str, int | float], general: Mapping[str, int | float]) -> dict[str, int | float]:
    """Options of one medium over those of the request; of two upper bounds of its pixels the lower counts."""
    options = {**general, **own}
    if "max_pixels" in own and "max_pixels" in general:
        options["max_pixels"] = min(own["max_pixels"], general["max_pixels"])
    if "min_pixels" in options and "max_pixels" in options:
        options["min_pixels"] = min(options["min_pixels"], options["max_pixels"])
    return options
