"""Pictures to try a model with: coloured squares, drawn from a seed."""

import hashlib
import io
import random
from typing import Final

from PIL import Image

from protocol.messages import Media

# Squares a side, and pixels of a square.
_SQUARES: Final = 6
_PIXELS: Final = 24


def picture(seed: int, wide: int = _SQUARES, high: int = _SQUARES) -> Media:
    """A PNG of `wide` × `high` squares."""
    colours = random.Random(seed).randbytes(3 * wide * high)
    squares = Image.frombytes("RGB", (wide, high), colours)
    image = squares.resize((wide * _PIXELS, high * _PIXELS), Image.Resampling.NEAREST)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    data = stream.getvalue()
    return Media("image", hashlib.blake2b(data, digest_size=32).digest(), data)
