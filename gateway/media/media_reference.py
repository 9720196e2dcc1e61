"""References to media in a request's parts: base64, data URIs and URLs. Their bytes are read later."""

from collections.abc import Mapping
from typing import Any, Final

from gateway.errors import invalid_choice
from protocol.to_worker import Media

# URLs of this scheme name media that an earlier response of the same tenant stored, by their digest in hexadecimal.
STORED: Final = "mlxd-media:"
DATA: Final = "data:"
IMAGE: Final = "image"
VIDEO: Final = "video"
AUDIO: Final = "audio"
# A PDF. The gateway replaces it by the texts and pictures of its pages, so workers never get one.
DOCUMENT: Final = "document"
# OpenAI's `detail` limits an image's pixels. `low` means a square of 512; the other values keep the model's own limit.
DETAILS: Final[dict[str, dict[str, int | float]]] = {
    "low": {"max_pixels": 512 * 512},
    "auto": {},
    "high": {},
    "original": {},
}


class FetchFailed(Exception):
    """Raised when a URL could not be fetched; the message gives the client the reason."""


class TooManyBytes(FetchFailed):
    """Raised when the body of a URL is larger than one medium may be."""


class Reference(Media, frozen=True, array_like=True):
    """Reference to an image, video, audio clip or document whose bytes are not read yet.

    Either `url` is set, which may be a data URI, or `encoded`, which is plain base64.
    """

    url: str = ""
    encoded: str = ""


def by_url(kind: str, url: str, param: str, options: Mapping[str, int | float] | None = None) -> dict[str, Any]:
    """Return a message part that refers to the medium at a URL."""
    return {"type": kind, "media": Reference(kind, b"", b"", dict(options or {}), param, url=url)}


def by_base64(kind: str, encoded: str, param: str, options: Mapping[str, int | float] | None = None) -> dict[str, Any]:
    """Return a message part that contains a medium as base64."""
    if not encoded or encoded.startswith(STORED):
        return by_url(kind, encoded, param, options)
    return {"type": kind, "media": Reference(kind, b"", b"", dict(options or {}), param, encoded=encoded)}


def document(
    source: str, heading: str, param: str, options: Mapping[str, int | float] | None = None, *, is_url: bool = False
) -> dict[str, Any]:
    """Return a message part that contains a document as base64 or a data URI, or refers to it with `is_url`.

    `heading` is the text before its first page. `options` apply to the pictures of its pages.
    """
    has_url = is_url or source[: len(DATA)].lower() == DATA
    part = (by_url if has_url else by_base64)(DOCUMENT, source, param, options)
    return {**part, "heading": heading}


def stored_url(digest: bytes) -> str:
    """Return the URL by which requests of the same tenant may refer to stored bytes."""
    return STORED + digest.hex()


def detail_options(detail: str | None, param: str) -> dict[str, int | float]:
    """Return the image options that a value of `detail` stands for. Raises `BadRequest`."""
    if detail is None:
        return {}
    if detail not in DETAILS:
        raise invalid_choice(detail, DETAILS, param)
    return DETAILS[detail]


def merged(own: Mapping[str, int | float], general: Mapping[str, int | float]) -> dict[str, int | float]:
    """Merge the options of one medium with the request's general options. The medium's options win, but of two pixel
    limits the lower applies.
    """
    options = {**general, **own}
    if "max_pixels" in own and "max_pixels" in general:
        options["max_pixels"] = min(own["max_pixels"], general["max_pixels"])
    if "min_pixels" in options and "max_pixels" in options:
        options["min_pixels"] = min(options["min_pixels"], options["max_pixels"])
    return options
