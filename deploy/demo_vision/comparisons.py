"""Questions that compare two pictures, and questions about a clip."""

from collections.abc import Sequence
from typing import Final

from deploy.demo_model.corpus.words import Source

from .pictures import CLIP_SIZES, SHAPES, SIZES, Item, clip, scene
from .questions import BACKGROUNDS, Asked, Clip, Medium, alone, an, colour_apart

_ORDER: Final = ("first", "second")


def two_pictures(src: Source) -> Asked:
    grounds = [src.pick(BACKGROUNDS) for _ in range(2)]
    sizes = [src.pick(SIZES) for _ in range(2)]
    roll = src.rng.random()
    if roll < 0.3:
        return _by_size(src, grounds)
    items = [alone(src, ground) for ground in grounds]
    while items[0].shape == items[1].shape and roll < 0.8:
        items[1] = alone(src, grounds[1])
    media: list[Medium] = [
        scene(src, [item], ground, size) for item, ground, size in zip(items, grounds, sizes, strict=True)
    ]
    which = src.integer(0, 1)
    item = items[which]
    if roll < 0.55:
        request = src.ask(
            (
                "What is in the {n} picture?",
                "Describe the {n} picture.",
                "What does the {n} image show?",
                "What do you see in the {n} picture?",
            ),
            n=_ORDER[which],
        )
        other = src.ask(("What is in the {n} picture?", "Describe the {n} image."), n=_ORDER[1 - which])
        return Asked(
            media, request, f"{an(item.name).capitalize()}.", [(other, f"{an(items[1 - which].name).capitalize()}.")]
        )
    if roll < 0.8:
        request = src.ask(
            (
                "Which picture shows {s}?",
                "Which picture has {s}?",
                "In which image is {s}?",
                "Which of the two pictures shows {s}?",
            ),
            s=an(item.shape),
        )
        return Asked(media, request, f"The {_ORDER[which]} picture.")
    if src.chance(0.5):
        items[1] = Item(items[0].shape, items[1].colour, items[1].x, items[1].y, items[1].radius)
        media[1] = scene(src, [items[1]], grounds[1], sizes[1])
    same = items[0].shape == items[1].shape
    request = src.ask(
        (
            "Do both pictures show the same shape?",
            "Is it the same shape in both pictures?",
            "Are the two shapes the same?",
        )
    )
    return Asked(
        media,
        request,
        f"Yes, both show {an(items[0].shape)}." if same else f"No, {an(items[0].shape)} and {an(items[1].shape)}.",
    )


def _by_size(src: Source, grounds: Sequence[str]) -> Asked:
    """Return a question about one shape in two sizes."""
    shape_, radii = src.pick(SHAPES), [src.rng.uniform(0.12, 0.2), src.rng.uniform(0.32, 0.42)]
    src.rng.shuffle(radii)
    size = src.pick(SIZES)
    items = [Item(shape_, colour_apart(src, ground), 0.5, 0.5, r) for ground, r in zip(grounds, radii, strict=True)]
    larger = src.chance(0.6)
    which = radii.index(max(radii) if larger else min(radii))
    word = src.pick(("larger", "bigger")) if larger else "smaller"
    request = src.ask(
        ("Which {s} is {w}?", "Which picture has the {w} {s}?", "In which image is the {s} {w}?"), s=shape_, w=word
    )
    return Asked(
        [scene(src, [item], ground, size) for item, ground in zip(items, grounds, strict=True)],
        request,
        f"The one in the {_ORDER[which]} picture.",
    )


_CHANGES: Final = {
    "left": "It moves to the left.", "right": "It moves to the right.", "up": "It moves up.", "down": "It moves down.", "grows": "It gets larger.", "shrinks": "It gets smaller.", "stays": "It does not move.",
}  # fmt: skip


def motion(src: Source) -> Asked:
    ground = src.pick(BACKGROUNDS)
    change = src.pick(("left", "right", "up", "down", "left", "right", "up", "down", "grows", "shrinks", "stays"))
    radius = src.rng.uniform(0.12, 0.19)
    free = 0.5 - 0.3 - radius
    item = Item(
        src.pick(SHAPES),
        colour_apart(src, ground),
        0.5 + src.rng.uniform(-1, 1) * max(0.0, free),
        0.5 + src.rng.uniform(-1, 1) * max(0.0, free),
        radius,
    )
    taken = Clip(clip(src, item, ground, change, src.pick(CLIP_SIZES)), src.pick((1.0, 2.0, 2.0, 2.0, 4.0, 8.0, 24.0)))
    asked = src.ask(
        (
            "Which way does the {s} move?",
            "How does the {s} move?",
            "In which direction does the {s} move?",
            "What does the {s} do?",
            "What happens to the {s}?",
            "What happens in this video?",
            "What happens in the clip?",
        ),
        s=src.pick((item.shape, "shape", item.name)),
    )
    what = src.ask(("What is in the video?", "What do you see in the video?", "What moves in this clip?"))
    forms = [(asked, _CHANGES[change]), (what, f"{an(item.name).capitalize()}.")]
    if src.chance(0.15) and not src.held_out:
        forms.reverse()
    return Asked([taken], *forms[0], forms[1:])
