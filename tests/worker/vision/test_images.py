"""Images: every format of clients gives its pixels upright, and what cannot be served is a refusal that says why."""

import random
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import ExifTags, Image

from protocol.failures import Code
from tests.support.pictures import BLUE, RED, WHITE, encoded, halves
from tests.support.scale import scaled
from worker.errors import RequestInvalid
from worker.vision.images import MediaLimits, check_bytes, check_shape, decode, read_header

LIMITS = MediaLimits(bytes=1 << 20, count=4, pixels=64_000_000)


def shown(data: bytes) -> Image.Image:
    return decode(data, read_header(data, LIMITS))


def refusal(act: Callable[[], object]) -> tuple[Code, str, str | None]:
    with pytest.raises(RequestInvalid) as caught:
        act()
    failure = caught.value.failure
    return failure.code, failure.message, failure.param


def near(color: object, expected: tuple[int, ...]) -> bool:
    return bool(np.all(np.abs(np.subtract(color, expected)) <= 12))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_give_their_size_and_pixels(kind: str) -> None:
    data = encoded(halves(), kind)
    header = read_header(data, LIMITS)
    image = decode(data, header)

    assert (header.format, header.width, header.height) == (kind, 64, 48)
    assert image.mode == "RGB"
    assert near(image.getpixel((32, 4)), RED)
    assert near(image.getpixel((32, 44)), BLUE)


def turned(orientation: int) -> Image.Image:
    """The file's pixels for a picture that shows red above blue once it is turned as `orientation` says."""
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }  # fmt: skip
    return halves().transpose(undo[orientation]) if orientation in undo else halves()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright_and_so_is_their_size(kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    data = encoded(turned(orientation), kind, exif=exif)
    header = read_header(data, LIMITS)
    image = decode(data, header)

    assert (header.width, header.height) == image.size == (64, 48)
    assert near(image.getpixel((32, 4)), RED)
    assert near(image.getpixel((32, 44)), BLUE)


def test_orientation_behind_the_pixels_of_a_png_counts_from_the_header_on() -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    plain, chunk = encoded(turned(6)), exif.tobytes()[6:]
    late = struct.pack(">I", len(chunk)) + b"eXIf" + chunk + struct.pack(">I", zlib.crc32(b"eXIf" + chunk))
    data = plain[:-12] + late + plain[-12:]

    header = read_header(data, LIMITS)
    assert (header.width, header.height) == decode(data, header).size == (64, 48)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(mode: str) -> None:
    image = Image.new("RGBA", (40, 40), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 20, 40))
    image = shown(encoded(image.convert(mode)))

    assert near(image.getpixel((5, 20)), (0, 0, 0))
    assert near(image.getpixel((35, 20)), WHITE)


def test_cmyk_is_read_as_the_colours_it_prints() -> None:
    image = shown(encoded(halves().convert("CMYK"), "JPEG"))

    assert near(image.getpixel((32, 4)), RED)


def test_sixteen_bits_keep_their_grey() -> None:
    levels = np.linspace(0, 65535, 40 * 40).astype(np.uint16).reshape(40, 40)
    for kind in ("PNG", "TIFF"):
        image = shown(encoded(Image.fromarray(levels), kind))
        assert np.array_equal(np.asarray(image)[..., 0], levels >> 8)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    later = halves().transpose(Image.Transpose.FLIP_TOP_BOTTOM)
    image = shown(encoded(halves(), kind, save_all=True, append_images=[later], duration=50))

    assert near(image.getpixel((32, 4)), RED)


def png_header(width: int, height: int) -> bytes:
    """A PNG of less than 1 kB that claims a size."""
    ihdr = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", ihdr), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )


@pytest.mark.parametrize("side", [8_001, 12_000, 60_000])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    code, message, param = refusal(lambda: read_header(png_header(side, side), LIMITS, "messages[0].content[1]"))

    assert code is Code.IMAGE_TOO_LARGE
    assert "too large" in message or "64000000" in message
    assert param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"\0\0\0\x1cftypavif\0\0\0\0avifmif1", "AVIF"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"<svg viewBox='0 0 1 1'></svg>", "SVG"),
        (b"\n<!DOCTYPE html><html><body>not found</body></html>", "HTML"),
        (b"%PDF-1.7 ...", "PDF"),
        (b"not an image", "a format that is not known"),
        # A pattern that tried each way to take these apart would not end.
        (b"<?xml " * 700, "a format that is not known"),
        (b"<!-- " * 700 + b"<svg>", "SVG"),
    ],
)
def test_what_is_no_image_that_is_taken_is_named(data: bytes, named: str) -> None:
    code, message, _ = refusal(lambda: read_header(data, LIMITS))

    assert code is Code.INVALID_IMAGE
    assert named in message
    assert "PNG, JPEG" in message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_a_truncated_file_is_refused_and_not_shown_in_part(kind: str) -> None:
    data = encoded(Image.effect_noise((64, 48), 90).convert("RGB"), kind)

    code, message, _ = refusal(lambda: shown(data[: len(data) * 2 // 3]))
    assert code is Code.INVALID_IMAGE
    assert "broken" in message or "truncated" in message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_truncated_file_is_refused_by_its_end_before_it_is_decoded(kind: str) -> None:
    data = encoded(Image.effect_noise((64, 48), 90).convert("RGB"), kind)

    assert read_header(data + b"\0" * 7, LIMITS).format == kind
    message = refusal(lambda: read_header(data[: len(data) * 2 // 3], LIMITS))[1]
    assert "truncated" in message or "broken" in message


def test_empty_and_large_files_are_refused_by_their_bytes() -> None:
    assert refusal(lambda: check_bytes(b"", LIMITS, "image", ""))[0] is Code.INVALID_IMAGE
    assert refusal(lambda: check_bytes(b"x" * (LIMITS.bytes + 1), LIMITS, "image", ""))[0] is Code.IMAGE_TOO_LARGE
    assert refusal(lambda: check_bytes(b"x" * (LIMITS.bytes + 1), LIMITS, "audio", ""))[0] is Code.INVALID_AUDIO


@pytest.mark.parametrize(("width", "height"), [(1, 1), (15, 400), (1, 20_000), (20_000, 99)])
def test_specks_and_strips_are_refused(width: int, height: int) -> None:
    code, message, _ = refusal(lambda: check_shape(width, height, 16, ""))

    assert code is Code.INVALID_IMAGE
    assert f"{width} × {height}" in message


@pytest.mark.filterwarnings("ignore")  # Pillow's, of what it repairs
def test_broken_files_are_refused_and_raise_nothing_else() -> None:
    """Bytes changed, cut out and put in at random."""
    draw = random.Random(3)
    kinds = ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"]
    whole = {kind: encoded(halves(24, 20), kind) for kind in kinds}
    for _ in range(scaled(5000, 400)):
        data = bytearray(whole[draw.choice(kinds)])
        for _ in range(draw.randint(1, 6)):
            at = draw.randrange(4, len(data))
            match draw.randrange(3):
                case 0:
                    data[at] = draw.randrange(256)
                case 1:
                    del data[at : at + draw.randint(1, 20)]
                case _:
                    data[at:at] = draw.randbytes(draw.randint(1, 8))
            if len(data) <= 5:
                break
        try:
            image = shown(bytes(data))
        except RequestInvalid as error:
            assert error.failure.code in (Code.INVALID_IMAGE, Code.IMAGE_TOO_LARGE)  # noqa: PT017
        else:
            assert image.mode == "RGB"
