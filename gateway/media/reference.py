"""References to media in a request's parts: base64, data URIs and URLs, whose bytes are read later."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import invalid_choice
from protocol.prompts import Media

# URLs of this scheme refer to media that an earlier response of the same tenant stored, by digest in hexadecimal.
STORED: Final = "mlxd-media:"
IMAGE: Final = "image"
VIDEO: Final = "video"
AUDIO: Final = "audio"
# OpenAI's `detail` limits pixels: `low` is a square of 512; the others keep the model's own size.
DETAILS: Final[dict[str, dict[str, int | float]]] = {
    "low": {"max_pixels": 512 * 512},
    "auto": {},
    "high": {},
    "original": {},
}


class FetchFailed(Exception):
    """Raised when a URL could not be fetched; the message gives the client the reason."""


class TooManyBytes(FetchFailed):
    """Raised when the body of a URL is larger than a medium may be."""


class Reference(Media, frozen=True, array_like=True):
    """Reference to a medium whose bytes are not read yet.

    Either `url` is set, which may be a data URI, or `encoded`, which is plain base64.
    """

    url: str = ""
    encoded: str = ""


def by_url(kind: str, url: str, param: str, options: Mapping[str, int | float] | None = None) -> dict[str, Any]:
    """Return the message part of the medium at a URL."""
    return {"type": kind, "media": Reference(kind, b"", b"", dict(options or {}), param, url=url)}


def by_base64(kind: str, encoded: str, param: str) -> dict[str, Any]:
    """Return the message part of a medium with these bytes."""
    if not encoded or encoded.startswith(STORED):
        return by_url(kind, encoded, param)
    return {"type": kind, "media": Reference(kind, b"", b"", {}, param, encoded=encoded)}


def stored_url(digest: bytes) -> str:
    """Return the URL by which a request of the same tenant may refer to stored bytes."""
    return STORED + digest.hex()


def detail_options(detail: str | None, param: str) -> dict[str, int | float]:
    """Return the image options of a `detail`. Raises `BadRequest`."""
    if detail is None:
        return {}
    if detail not in DETAILS:
        raise invalid_choice(detail, DETAILS, param)
    return DETAILS[detail]


def merged(own: Mapping[str, int | float], general: Mapping[str, int | float]) -> dict[str, int | float]:
    """Merge one medium's options into the request's options, which they override; of two pixel limits, the lower
    applies.
    """
    options = {**general, **own}
    if "max_pixels" in own and "max_pixels" in general:
        options["max_pixels"] = min(own["max_pixels"], general["max_pixels"])
    if "min_pixels" in options and "max_pixels" in options:
        options["min_pixels"] = min(options["min_pixels"], options["max_pixels"])
    return options
