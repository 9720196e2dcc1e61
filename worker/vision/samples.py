"""Test pictures for self-checks: coloured squares, generated from a seed."""

import hashlib
import io
import random
from typing import Final

from PIL import Image

from protocol.prompts import Media

# Default number of squares per side of a picture.
_SQUARES_PER_SIDE: Final = 6
# Length of a square's side in pixels.
_SQUARE_SIDE_PIXELS: Final = 24


def picture(seed: int, wide: int = _SQUARES_PER_SIDE, high: int = _SQUARES_PER_SIDE) -> Media:
    """Return a PNG of `wide` × `high` squares."""
    colours = random.Random(seed).randbytes(3 * wide * high)
    squares = Image.frombytes("RGB", (wide, high), colours)
    image = squares.resize((wide * _SQUARE_SIDE_PIXELS, high * _SQUARE_SIDE_PIXELS), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    data = stream.getvalue()
    return Media("image", hashlib.blake2b(data, digest_size=32).digest(), data)
