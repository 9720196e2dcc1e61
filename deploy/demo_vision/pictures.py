"""Rendered pictures: coloured shapes, numbers, words, and short clips of one moving shape.

All sizes are pixels of the final picture. A scene is drawn larger and scaled down, as a server scales pictures.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from deploy.demo_model.corpus.words import Source
from PIL import Image, ImageDraw, ImageFont

Rgb = tuple[int, int, int]
# Each word names one range of colours. Gaps between the ranges ensure that each picture has one correct answer.
COLOURS: Final[dict[str, Rgb]] = {
    "red": (215, 35, 35), "green": (40, 160, 60), "blue": (40, 80, 215), "yellow": (245, 220, 50), "orange": (245, 140, 25), "purple": (130, 45, 160), "pink": (245, 150, 190),
    "brown": (120, 72, 36), "black": (18, 18, 18), "white": (248, 248, 248), "gray": (135, 135, 135),
}  # fmt: skip
JITTER: Final = 12
SHAPES: Final = ("circle", "square", "triangle", "star", "cross", "diamond", "ring", "heart")
# Width and height are multiples of 16 with at most 128 × 128 pixels: the sizes to which the image processor scales any
# picture.
SIZES: Final = ((128, 128),) * 6 + (
    (96, 96), (112, 112), (80, 80), (144, 112), (112, 144), (160, 96), (96, 160), (128, 96), (96, 128), (192, 80), (176, 80), (112, 80), (128, 112),
)  # fmt: skip
CLIP_SIZES: Final = ((64, 64), (80, 80), (96, 96), (96, 64), (64, 96), (112, 80))
FRAMES: Final = 4


@dataclass(frozen=True, slots=True)
class Item:
    """Shape with its centre and radius, as fractions of the picture's width, height and shorter side."""

    shape: str
    colour: str
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


def tint(src: Source, colour: str) -> Rgb:
    r, g, b = (min(255, max(0, value + src.integer(-JITTER, JITTER))) for value in COLOURS[colour])
    return r, g, b


def scene(src: Source, items: Sequence[Item], background: str, size: tuple[int, int]) -> Image.Image:
    """Draw a picture of `items`, in pixels of `size`."""
    scale = src.pick((1, 2, 2, 3, 4))
    width, height = size[0] * scale, size[1] * scale
    canvas = Image.new("RGB", (width, height), tint(src, background))
    draw = ImageDraw.Draw(canvas)
    for item in items:
        turn = math.radians(src.integer(-7, 7))
        _draw(
            draw,
            item.shape,
            item.x * width,
            item.y * height,
            item.radius * min(width, height),
            turn,
            tint(src, item.colour),
        )
    return _scaled(canvas, size)


def _scaled(canvas: Image.Image, size: tuple[int, int]) -> Image.Image:
    return canvas if canvas.size == size else canvas.resize(size, Image.Resampling.BICUBIC)


def _polygon(x: float, y: float, points: Sequence[tuple[float, float]], turn: float) -> list[tuple[float, float]]:
    sine, cosine = math.sin(turn), math.cos(turn)
    return [(x + px * cosine - py * sine, y + px * sine + py * cosine) for px, py in points]


def _draw(draw: Any, shape: str, x: float, y: float, r: float, turn: float, fill: Rgb) -> None:
    match shape:
        case "circle":
            draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
        case "ring":
            draw.ellipse((x - r, y - r, x + r, y + r), outline=fill, width=max(2, round(r * 0.36)))
        case _:
            draw.polygon(_polygon(x, y, _POINTS[shape](r), turn), fill=fill)


def _star(r: float) -> list[tuple[float, float]]:
    return [
        (
            (r if k % 2 == 0 else r * 0.42) * math.sin(k * math.pi / 5),
            -(r if k % 2 == 0 else r * 0.42) * math.cos(k * math.pi / 5),
        )
        for k in range(10)
    ]


def _heart(r: float) -> list[tuple[float, float]]:
    steps = [k * math.pi / 20 for k in range(40)]
    return [
        (
            r * math.sin(t) ** 3,
            -r * (13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 15,
        )
        for t in steps
    ]


_POINTS: Final[dict[str, Callable[[float], list[tuple[float, float]]]]] = {
    "square": lambda r: [(-0.85 * r, -0.85 * r), (0.85 * r, -0.85 * r), (0.85 * r, 0.85 * r), (-0.85 * r, 0.85 * r)],
    "triangle": lambda r: [(0, -r), (0.95 * r, 0.75 * r), (-0.95 * r, 0.75 * r)],
    "diamond": lambda r: [(0, -r), (0.75 * r, 0), (0, r), (-0.75 * r, 0)],
    "cross": lambda r: [
        (-0.3 * r, -r), (0.3 * r, -r), (0.3 * r, -0.3 * r), (r, -0.3 * r), (r, 0.3 * r), (0.3 * r, 0.3 * r),
        (0.3 * r, r), (-0.3 * r, r), (-0.3 * r, 0.3 * r), (-r, 0.3 * r), (-r, -0.3 * r), (-0.3 * r, -0.3 * r),
    ],
    "star": _star,
    "heart": _heart,
}  # fmt: skip


# text


@cache
def extra_fonts() -> tuple[Path, ...]:
    """Return matplotlib's fonts if it is installed. They only add variety to the training data."""
    try:
        import matplotlib
    except ImportError:
        return ()
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = (
        "DejaVuSans",
        "DejaVuSans-Bold",
        "DejaVuSerif",
        "DejaVuSerif-Bold",
        "DejaVuSansMono",
        "DejaVuSansMono-Bold",
    )
    return tuple(folder / f"{name}.ttf" for name in names if (folder / f"{name}.ttf").exists())


def _font(src: Source, size: int) -> Any:
    fonts = () if src.held_out else extra_fonts()
    if fonts and src.chance(0.5):
        return ImageFont.truetype(str(src.pick(fonts)), size)
    return ImageFont.load_default(size)


def lettering(src: Source, text: str, size: tuple[int, int]) -> Image.Image:
    """Draw `text` in one line, at the largest size that fits or somewhat smaller."""
    dark = src.chance(0.7)
    background = (
        src.pick(("white", "yellow", "pink", "gray", "white"))
        if dark
        else src.pick(("black", "blue", "red", "purple", "green", "brown"))
    )
    ink = (
        src.pick(("black", "blue", "red", "purple", "brown", "black"))
        if dark
        else src.pick(("white", "yellow", "white"))
    )
    if background == "gray" and ink in ("red", "blue", "purple", "brown"):
        ink = "black"
    scale = src.pick((1, 2, 2, 3))
    width, height = size[0] * scale, size[1] * scale
    canvas = Image.new("RGB", (width, height), tint(src, background))
    draw = ImageDraw.Draw(canvas)
    share = src.rng.uniform(0.78, 0.94)
    points = height
    while True:
        font = _font_of(src, points)
        left, top, right, bottom = draw.textbbox((0, 0), text, font=font)
        fit = min(width * share / max(1, right - left), height * 0.8 / max(1, bottom - top))
        if fit >= 1:
            break
        points = max(6, int(points * fit))
        if points <= 6:
            break
    x = (width - (right - left)) * src.rng.uniform(0.25, 0.75) - left
    y = (height - (bottom - top)) * src.rng.uniform(0.3, 0.7) - top
    draw.text((x, y), text, font=font, fill=tint(src, ink))
    return _scaled(canvas, size)


def _font_of(src: Source, points: int) -> Any:
    """Choose the picture's font, which stays the same while the size is searched."""
    state = src.rng.getstate()
    font = _font(src, points)
    if points:
        src.rng.setstate(state)
    return font


# clips


def clip(src: Source, item: Item, background: str, change: str, size: tuple[int, int]) -> list[Image.Image]:
    """Draw four frames in which the item moves left, right, up or down, grows, shrinks, or stays."""
    step = src.rng.uniform(0.11, 0.19)
    fill, ground = tint(src, item.colour), tint(src, background)
    frames: list[Image.Image] = []
    scale = src.pick((1, 2, 3))
    width, height = size[0] * scale, size[1] * scale
    for number in range(FRAMES):
        t = number - (FRAMES - 1) / 2
        x, y, r = item.x, item.y, item.radius
        match change:
            case "left":
                x -= t * step
            case "right":
                x += t * step
            case "up":
                y -= t * step
            case "down":
                y += t * step
            case "grows":
                r *= 1 + t * 0.28
            case "shrinks":
                r *= 1 - t * 0.28
            case _:
                pass
        canvas = Image.new("RGB", (width, height), ground)
        _draw(ImageDraw.Draw(canvas), item.shape, x * width, y * height, r * min(width, height), 0.0, fill)
        frames.append(_scaled(canvas, size))
    return frames
