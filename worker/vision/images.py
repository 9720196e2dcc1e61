"""Images: format, size and orientation from the header only, and pixels on demand."""

import re
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Final

import numpy as np
from PIL import ExifTags, Image, UnidentifiedImageError

from protocol.failures import Code
from worker.errors import RequestInvalid

# Formats by their first bytes; the client's media type is ignored.
_SIGNATURES: Final = (
    (rb"\x89PNG\r\n\x1a\n", "PNG"),
    (rb"\xff\xd8\xff", "JPEG"),
    (rb"RIFF....WEBP", "WEBP"),
    (rb"GIF8[79]a", "GIF"),
    (rb"BM", "BMP"),
    (rb"II\*\x00|MM\x00\*|II\+\x00|MM\x00\+", "TIFF"),
)
# Unsupported formats that are recognized only for the error message.
_UNSUPPORTED_SIGNATURES: Final = (
    (rb"....ftyp(heic|heix|heim|heis|hevc|hevx|mif1|msf1)", "HEIC"),
    (rb"....ftypavi[fs]", "AVIF"),
    (rb"%PDF-", "PDF"),
    (rb"(?is)\s*(<svg[\s>]|<(\?xml|!--|!doctype svg).{0,4096}?<svg[\s>])", "SVG"),
    (rb"(?is)\s*(<!doctype html|<html|<head|<body)", "HTML"),
    (rb"\xff\x0a|\x00\x00\x00\x0cJXL ", "JPEG XL"),
)
FORMATS: Final = "PNG, JPEG, WebP, GIF, BMP and TIFF"
_SIGNATURE_MAX_BYTES: Final = 4096
# Transpositions by EXIF orientation. Pillow rotates a TIFF automatically.
_TRANSPOSE_BY_ORIENTATION: Final = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Maximum number of chunks of a PNG that are searched for its orientation.
_MAX_CHUNKS: Final = 10_000
_MAX_ASPECT: Final = 200
# Errors that Pillow and its decoders raise for broken files, and for images that exceed Pillow's limits.
_BROKEN: Final = (OSError, ValueError, SyntaxError, TypeError, LookupError, EOFError, OverflowError, struct.error)
_BOMBS: Final = (Image.DecompressionBombError, Image.DecompressionBombWarning)


@dataclass(slots=True, frozen=True)
class MediaLimits:
    """Maximum bytes of one medium, media per request, and pixels of an image or video frame."""

    bytes: int
    count: int
    pixels: int


@dataclass(slots=True, frozen=True)
class ImageHeader:
    """Format of an image, and its size after the rotation that its EXIF data require."""

    format: str
    width: int
    height: int
    orientation: int = 1


def refused(message: str, param: str, code: Code = Code.INVALID_IMAGE) -> RequestInvalid:
    """Build the refusal of one medium, with the path of its part."""
    return RequestInvalid(code, message, param=param or None)


def check_bytes(data: bytes, limits: MediaLimits, kind: str, param: str) -> None:
    """Check the size of a medium. Raises `RequestInvalid` if it is empty or too large."""
    if not data:
        raise refused(f"The {kind} is empty.", param, INVALID[kind])
    if len(data) > limits.bytes:
        message = f"The {kind} has {len(data)} bytes; at most {limits.bytes} are taken."
        raise refused(message, param, Code.IMAGE_TOO_LARGE if kind == "image" else INVALID[kind])


INVALID: Final = {"image": Code.INVALID_IMAGE, "video": Code.INVALID_VIDEO, "audio": Code.INVALID_AUDIO}


def read_header(data: bytes, limits: MediaLimits, param: str = "") -> ImageHeader:
    """Read the format and size of an image without decoding it. Raises `RequestInvalid`, also for an image beyond
    `limits`.
    """
    kind = _format(data, param)
    with _opened(data, kind, param) as image:
        width, height, orientation = image.width, image.height, _orientation(image, kind, data)
    if not _is_whole(kind, data):
        raise refused(f"The {kind} image is truncated.", param)
    if width * height > limits.pixels:
        message = f"The image has {width} × {height} pixels; at most {limits.pixels} are taken."
        raise refused(message, param, Code.IMAGE_TOO_LARGE)
    if orientation >= 5:
        width, height = height, width
    return ImageHeader(kind, width, height, orientation)


def check_shape(width: int, height: int, smallest: int, param: str) -> None:
    """Check the shape of an image. Raises `RequestInvalid` if it is smaller than a patch, or its aspect ratio is
    extreme.
    """
    if min(width, height) < smallest:
        message = f"The image has {width} × {height} pixels; the model takes none with a side below {smallest}."
        raise refused(message, param)
    if max(width, height) > _MAX_ASPECT * min(width, height):
        message = f"The image has {width} × {height} pixels; one side is more than {_MAX_ASPECT} times the other."
        raise refused(message, param)


def decode(data: bytes, header: ImageHeader, param: str = "") -> Image.Image:
    """Decode the first frame of an image to upright RGB, with transparency over white. Raises `RequestInvalid`."""
    with _opened(data, header.format, param) as image:
        image.load()
        pixels = _rgb(image)
    turn = _TRANSPOSE_BY_ORIENTATION.get(header.orientation)
    upright = pixels if turn is None else pixels.transpose(turn)
    if upright.size != (header.width, header.height):
        raise refused(f"The {header.format} image is broken: its frames differ in size.", param)
    return upright


@contextmanager
def _opened(data: bytes, kind: str, param: str) -> Generator[Image.Image]:
    """Open an image with Pillow. Errors that Pillow raises for the image are translated to refusals."""
    try:
        with Image.open(BytesIO(data), formats=(kind,)) as image:
            yield image
    except _BOMBS as error:
        raise refused(f"The image is too large: {error}", param, Code.IMAGE_TOO_LARGE) from error
    except _BROKEN as error:
        raise refused(f"The {kind} image is broken: {_reason(error)}", param) from error


def _format(data: bytes, param: str) -> str:
    start = data[:_SIGNATURE_MAX_BYTES]
    for sign, kind in _SIGNATURES:
        if re.match(sign, start, re.DOTALL):
            return kind
    other = next((kind for sign, kind in _UNSUPPORTED_SIGNATURES if re.match(sign, start, re.DOTALL)), "")
    what = f"is {other}, which is not taken" if other else "has a format that is not known"
    raise refused(f"The image {what}; {FORMATS} are.", param)


def _orientation(image: Image.Image, kind: str, data: bytes) -> int:
    """Return the orientation in EXIF or XMP data, 1 if there is none."""
    if kind == "TIFF":
        return 1
    if kind == "PNG" and "exif" not in image.info and (late := _png_exif(data)):
        image.info["exif"] = late
    # The base class's method is called, because the method for PNG decodes the image to find data after it.
    value = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
    return value if isinstance(value, int) and value in _TRANSPOSE_BY_ORIENTATION else 1


def _is_whole(kind: str, data: bytes) -> bool:
    """Return whether a file is complete, for formats that mark their end; other damage is detected in decoding."""
    match kind:
        case "PNG":
            names = [name for name, _ in _chunks(data)]
            return b"IEND" in names or len(names) == _MAX_CHUNKS
        case "JPEG":
            return data.rfind(b"\xff\xd9") > data.find(b"\xff\xda")
        case _:
            return True


def _png_exif(data: bytes) -> bytes:
    """Return the EXIF data of a PNG, whose chunk may be anywhere in the file."""
    return next((b"Exif\x00\x00" + body for name, body in _chunks(data) if name == b"eXIf"), b"")


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the names and contents of the complete chunks of a PNG."""
    at = 8
    for _ in range(_MAX_CHUNKS):
        if at + 12 > len(data):
            return
        length, name = struct.unpack_from(">I4s", data, at)
        if at + 12 + length > len(data):
            return
        # Contents are copied only for EXIF chunks.
        yield name, data[at + 8 : at + 8 + length] if name == b"eXIf" else b""
        at += length + 12


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _gray(np.asarray(image).astype(np.uint16) >> 8)
    if image.mode in ("I", "F"):
        return _gray(_eight_bits(np.asarray(image, dtype=np.float32)))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        over = Image.new("RGBA", image.size, "white")
        over.alpha_composite(image.convert("RGBA"))
        return over.convert("RGB")
    return image.copy() if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(values: np.ndarray) -> np.ndarray:
    """Scale wide integers and floats to 8 bits. The range is the smallest that contains all values: up to 1, to 255, or
    to 65,535.
    """
    most = float(np.nanmax(values, initial=0.0))
    scale = 255.0 if most <= 1.0 else 1.0 if most <= 255.0 else 255.0 / 65535.0
    return np.nan_to_num(values * scale).clip(0, 255)


def _gray(values: np.ndarray) -> Image.Image:
    return Image.fromarray(values.astype(np.uint8)).convert("RGB")


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it cannot be read."
    text = str(error).partition("\n")[0].strip()
    return f"{text or type(error).__name__}."
