"""Media that the request itself contains, as base64 or data URIs. Large ones are decoded in a thread."""

import binascii
from typing import Final

from gateway.errors import BadRequest
from gateway.media.reference import IMAGE, Reference
from protocol.prompts import Media

# vLLM's prefix for a video as a list of JPEG files, separated by commas, which needs no video decoder.
FRAMES: Final = "data:video/jpeg;base64,"
FRAMES_MAX: Final = 2048
_SPACE: Final = str.maketrans("", "", " \t\r\n")
_URL_SAFE: Final = str.maketrans("-_", "+/")
_SHOWN_MAX: Final = 40


def invalid(reference: Media, reason: str) -> BadRequest:
    """Return the error for an invalid image, video, audio clip or document."""
    return BadRequest(f"'{reference.param}': {reason}.", reference.param, f"invalid_{reference.kind}")


def too_large(reference: Reference, limit_bytes: int) -> BadRequest:
    """Return the error for an image, video, audio clip or document that is too large."""
    code = "image_too_large" if reference.kind == IMAGE else f"invalid_{reference.kind}"
    return BadRequest(f"'{reference.param}' is larger than {limit_bytes} bytes.", reference.param, code)


def decode(reference: Reference, limit_bytes: int) -> tuple[bytes, int]:
    """Return the bytes of a medium, and the number of frames if the bytes are a list of video frames, else 0.

    Raises `BadRequest`.
    """
    if reference.encoded:
        return _bytes(reference, reference.encoded, limit_bytes), 0
    if reference.url[: len(FRAMES)].lower() == FRAMES and reference.kind == "video":
        return _frames(reference, limit_bytes)
    head, comma, encoded = reference.url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise invalid(reference, f"a data URI must be base64, not {head[:_SHOWN_MAX]!r}")
    return _bytes(reference, encoded, limit_bytes), 0


def _frames(reference: Reference, limit_bytes: int) -> tuple[bytes, int]:
    frames = reference.url[len(FRAMES) :].split(",", FRAMES_MAX)
    if len(frames) > FRAMES_MAX:
        raise invalid(reference, f"at most {FRAMES_MAX} frames are taken")
    parts: list[bytes] = []
    size = 0
    for frame in frames:
        data = _bytes(reference, frame, limit_bytes)
        parts += (len(data).to_bytes(4, "big"), data)
        size += 4 + len(data)
        if size > limit_bytes:
            raise too_large(reference, limit_bytes)
    return b"".join(parts), len(frames)


def _bytes(reference: Reference, encoded: str, limit_bytes: int) -> bytes:
    if len(encoded) // 4 * 3 > limit_bytes + 4:
        raise too_large(reference, limit_bytes)
    try:
        data = _strict(encoded)
    except ValueError:
        raise invalid(reference, "it is not valid base64") from None
    if not data:
        raise invalid(reference, "it is empty")
    if len(data) > limit_bytes:
        raise too_large(reference, limit_bytes)
    return data


def _strict(encoded: str) -> bytes:
    """Decode base64. Encoders differ, so line ends, missing padding and the URL-safe alphabet are accepted.

    Raises `ValueError`.
    """
    try:
        return binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error:
        text = encoded.translate(_SPACE).translate(_URL_SAFE).rstrip("=")
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
