"""Pictures of every format that clients send, made by Pillow, and their files broken in ways that occur."""

from io import BytesIO
from typing import Any

from PIL import Image, ImageDraw

RED, BLUE, WHITE = (220, 20, 20), (20, 20, 220), (255, 255, 255)


def halves(width: int = 64, height: int = 48) -> Image.Image:
    """A picture that is red in its upper half and blue in its lower one."""
    image = Image.new("RGB", (width, height), BLUE)
    image.paste(RED, (0, 0, width, height // 2))
    return image


def shape(kind: str, color: tuple[int, int, int], x: int = 36, side: int = 128) -> Image.Image:
    """A circle or a square at half height, as demo-vision knows them."""
    image = Image.new("RGB", (side, side), WHITE)
    draw = ImageDraw.Draw(image)
    box = (x, side * 3 // 8, x + side // 4, side * 5 // 8)
    (draw.ellipse if kind == "circle" else draw.rectangle)(box, fill=color)
    return image


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """File of an image."""
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def spoiled(data: bytes) -> bytes:
    """A file that is whole by its header and its end, and cannot be decoded."""
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 16]) + data[middle + 16 :]
