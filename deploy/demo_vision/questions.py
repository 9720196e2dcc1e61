"""Questions about one picture, about two and about a clip. Each has one correct answer in one wording, so that a
measurement can compare text."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from deploy.demo_model.corpus.words import RARE, Source, is_held_out
from PIL import Image

from .pictures import CLIP_SIZES, COLOURS, SHAPES, SIZES, Item, clip, lettering, scene

NUMBER_WORDS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BACKGROUNDS: Final = ("white", "white", "white", "black", "gray", "yellow", "pink", "blue", "green")
# Pairs of colours that a viewer could confuse if one lies on the other.
CLOSE: Final = (
    {"white", "yellow"}, {"yellow", "orange"}, {"red", "orange"}, {"pink", "red"}, {"pink", "purple"}, {"pink", "white"}, {"brown", "red"}, {"brown", "black"}, {"purple", "blue"},
    {"gray", "white"}, {"gray", "pink"}, {"black", "purple"}, {"green", "gray"}, {"blue", "black"}, {"brown", "gray"}, {"brown", "purple"}, {"orange", "brown"}, {"green", "brown"}, {"green", "blue"},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Clip:
    """Video: its frames, and the frames per second."""

    frames: list[Image.Image]
    fps: float


Medium = Image.Image | Clip


@dataclass(slots=True)
class Asked:
    """Question: pictures, the request, the answer, and further questions about the same pictures."""

    media: list[Medium]
    request: str
    answer: str
    more: list[tuple[str, str]] = field(default_factory=list)


def colour_apart(src: Source, *apart: str) -> str:
    while True:
        colour = src.pick(tuple(COLOURS))
        if all(colour != other and {colour, other} not in CLOSE for other in apart):
            return colour


def an(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _plural(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"


def alone(src: Source, background: str, *, low: float = 0.2, high: float = 0.42) -> Item:
    radius = src.rng.uniform(low, high)
    margin = radius + 0.03
    spread = max(0.0, 0.5 - margin)
    return Item(
        src.pick(SHAPES),
        colour_apart(src, background),
        0.5 + src.rng.uniform(-spread, spread),
        0.5 + src.rng.uniform(-spread, spread),
        radius,
    )


# what is asked


_WHAT: Final = (
    "What is in this picture?", "What is in the picture?", "Describe the picture.", "Describe this image.", "What do you see?", "What is this?", "What does the picture show?", "What's in this image?",
    "Tell me what you see.", "What is shown here?",
)  # fmt: skip
_SHAPE: Final = (
    "What shape is this?",
    "What shape is in the picture?",
    "Which shape do you see?",
    "Name the shape.",
    "What is the shape in the image?",
    "What kind of shape is it?",
    "Which shape is shown?",
)
_COLOUR: Final = (
    "What colour is the {s}?",
    "What color is the {s}?",
    "Which colour does the {s} have?",
    "Name the color of the {s}.",
    "Tell me the colour of the {s}.",
    "What is the color of the {s}?",
)
_GROUND: Final = (
    "What colour is the background?",
    "What color is the background?",
    "Which colour is behind the {s}?",
    "Name the background color.",
)
_COUNT: Final = (
    "How many {s} are there?",
    "How many {s} do you see?",
    "Count the {s}.",
    "How many {s} are in the picture?",
    "What is the number of {s}?",
    "Tell me how many {s} there are.",
)
_WHERE: Final = (
    "Where is the {s}?",
    "In which part of the picture is the {s}?",
    "Where do you see the {s}?",
    "Where in the image is the {s}?",
    "Find the {s}.",
)
_NUMBER: Final = (
    "What number is this?",
    "Which number is in the picture?",
    "Read the number.",
    "What number do you see?",
    "What is the number in the image?",
    "Which number is written here?",
)
_WORD: Final = (
    "What does it say?",
    "What is written here?",
    "Read the word.",
    "Which word is in the picture?",
    "What word do you see?",
    "Read the text in the image.",
    "What does the sign say?",
)


def described(src: Source) -> Asked:
    ground = src.pick(BACKGROUNDS)
    size = src.pick(SIZES)
    if src.chance(0.5):
        item = alone(src, ground)
        asked = Asked(
            [scene(src, [item], ground, size)],
            src.ask(_WHAT),
            f"{an(item.name).capitalize()} on {an(ground)} background.",
        )
        asked.more = _about(src, item, ground)
        return asked
    first, second = _pair(src, ground)
    return Asked(
        [scene(src, [first, second], ground, size)],
        src.ask(_WHAT),
        f"{an(first.name).capitalize()} and {an(second.name)}.",
        _relations(src, first, second),
    )


def _about(src: Source, item: Item, ground: str) -> list[tuple[str, str]]:
    return [
        (src.ask(_SHAPE), f"It is {an(item.shape)}."),
        (src.ask(_COLOUR, s=item.shape), f"The {item.shape} is {item.colour}."),
        (src.ask(_GROUND, s=item.shape), f"The background is {ground}."),
    ]


def shape(src: Source) -> Asked:
    ground = src.pick(BACKGROUNDS)
    item = alone(src, ground, low=0.14)
    return Asked(
        [scene(src, [item], ground, src.pick(SIZES))],
        src.ask(_SHAPE),
        f"It is {an(item.shape)}.",
        _about(src, item, ground)[1:],
    )


def colour(src: Source) -> Asked:
    ground = src.pick(BACKGROUNDS)
    if src.chance(0.5):
        item = alone(src, ground, low=0.14)
        picture = scene(src, [item], ground, src.pick(SIZES))
        roll = src.rng.random()
        if roll < 0.2:
            return Asked(
                [picture], src.ask(_GROUND, s=item.shape), f"The background is {ground}.", _about(src, item, ground)[:2]
            )
        name = item.shape if roll < 0.8 else "shape"
        return Asked(
            [picture], src.ask(_COLOUR, s=name), f"The {name} is {item.colour}.", _about(src, item, ground)[::2]
        )
    first, second = _pair(src, ground)
    picture = scene(src, [first, second], ground, src.pick(SIZES))
    item, other = (first, second) if src.chance(0.5) else (second, first)
    return Asked(
        [picture],
        src.ask(_COLOUR, s=item.shape),
        f"The {item.shape} is {item.colour}.",
        [(src.ask(_COLOUR, s=other.shape), f"The {other.shape} is {other.colour}.")],
    )


def _pair(src: Source, ground: str) -> tuple[Item, Item]:
    """Return two shapes with different names; the first is left of the second, or above it."""
    shapes = src.sample(SHAPES, 2)
    r = [src.rng.uniform(0.13, 0.2) for _ in shapes]
    colours = [colour_apart(src, ground)]
    colours.append(colour_apart(src, ground, colours[0]) if src.chance(0.9) else colours[0])
    along = (0.27 + src.rng.uniform(-0.04, 0.04), 0.73 + src.rng.uniform(-0.04, 0.04))
    across = [0.5 + src.rng.uniform(-0.08, 0.08) for _ in shapes]
    if src.chance(0.5):
        return Item(shapes[0], colours[0], along[0], across[0], r[0]), Item(
            shapes[1], colours[1], along[1], across[1], r[1]
        )
    return Item(shapes[0], colours[0], across[0], along[0], r[0]), Item(
        shapes[1], colours[1], across[1], along[1], r[1]
    )


def _relations(src: Source, first: Item, second: Item) -> list[tuple[str, str]]:
    """Return questions about the relative positions of two shapes of `_pair`."""
    sideways = abs(first.x - second.x) > abs(first.y - second.y)
    before, after = ("left of", "right of") if sideways else ("above", "below")
    one, other = first.name, second.name
    if first.shape != second.shape and src.chance(0.5):
        one, other = first.shape, second.shape
    forms = [
        (
            src.ask(
                ("What is {w} the {s}?", "Which shape is {w} the {s}?", "What do you see {w} the {s}?"),
                w=before,
                s=other,
            ),
            f"{an(first.name).capitalize()}.",
        ),
        (
            src.ask(
                ("What is {w} the {s}?", "Which shape is {w} the {s}?", "What do you see {w} the {s}?"), w=after, s=one
            ),
            f"{an(second.name).capitalize()}.",
        ),
        (src.ask(("Is the {a} {w} the {b}?", "Do you see the {a} {w} the {b}?"), a=one, w=before, b=other), "Yes."),
        (
            src.ask(("Is the {a} {w} the {b}?", "Do you see the {a} {w} the {b}?"), a=one, w=after, b=other),
            f"No, it is {before} the {other}.",
        ),
        (src.ask(("Is the {a} {w} the {b}?", "Do you see the {a} {w} the {b}?"), a=other, w=after, b=one), "Yes."),
        (
            src.ask(("Is the {a} {w} the {b}?", "Do you see the {a} {w} the {b}?"), a=other, w=before, b=one),
            f"No, it is {after} the {one}.",
        ),
    ]
    src.rng.shuffle(forms)
    return forms


_CELLS: Final = (
    ("top left corner", "top", "top right corner"),
    ("left", "center", "right"),
    ("bottom left corner", "bottom", "bottom right corner"),
)


def position(src: Source) -> Asked:
    ground = src.pick(BACKGROUNDS)
    size = src.pick(SIZES)
    if src.chance(0.55):
        pair = _pair(src, ground)
        forms = _relations(src, *pair)
        return Asked([scene(src, pair, ground, size)], *forms[0], forms[1:3])
    row, column = src.integer(0, 2), src.integer(0, 2)
    item = alone(src, ground, low=0.11, high=0.16)
    # The radius is a fraction of the shorter side, so the shape stays inside the picture on every side.
    item = Item(
        item.shape,
        item.colour,
        (column + 0.5) / 3 + src.rng.uniform(-0.04, 0.04),
        (row + 0.5) / 3 + src.rng.uniform(-0.04, 0.04),
        item.radius,
    )
    name = item.shape if src.chance(0.7) else item.name
    place = _CELLS[row][column]
    where = (
        f"on the {place}"
        if place in ("left", "right")
        else f"at the {place}"
        if place in ("top", "bottom")
        else f"in the {place}"
    )
    return Asked(
        [scene(src, [item], ground, size)],
        src.ask(_WHERE, s=name),
        f"The {name} is {where}.",
        _about(src, item, ground)[:2],
    )


def _places(src: Source, count: int, size: tuple[int, int]) -> list[tuple[float, float, float]]:
    """Return centres and radii of `count` shapes that do not touch."""
    width, height = size
    short = min(size)
    top = {1: 0.3, 2: 0.22, 3: 0.19, 4: 0.17, 5: 0.155, 6: 0.145}.get(count, 0.13)
    while True:
        found: list[tuple[float, float, float]] = []
        for _ in range(300):
            r = src.rng.uniform(top * 0.72, top) * short
            x, y = src.rng.uniform(r + 3, width - r - 3), src.rng.uniform(r + 3, height - r - 3)
            if all(math_hypot(x - a, y - b) > (r + c) * 1.12 + 2 for a, b, c in found):
                found.append((x, y, r))
                if len(found) == count:
                    return [(x / width, y / height, r / short) for x, y, r in found]
        top *= 0.92


def math_hypot(x: float, y: float) -> float:
    return (x * x + y * y) ** 0.5


def count(src: Source) -> Asked:
    ground = src.pick(BACKGROUNDS)
    size = src.pick(SIZES)
    total = src.integer(1, 9)
    places = _places(src, total, size)
    roll = src.rng.random()
    kinds = src.sample(SHAPES, 3)
    tones = [colour_apart(src, ground)]
    tones.append(colour_apart(src, ground, tones[0]))
    if roll < 0.5:  # all shapes are alike
        items = [Item(kinds[0], tones[0] if src.chance(0.8) else src.pick(tones), *place) for place in places]
    else:
        items = [Item(src.pick(kinds[:2]), src.pick(tones), *place) for place in places]
    picture = scene(src, items, ground, size)
    forms = [
        _counted(src, _plural(kinds[0]), kinds[0], sum(item.shape == kinds[0] for item in items)),
        _counted(src, "shapes", "shape", total),
    ]
    if roll >= 0.5:
        forms.insert(0, _counted(src, _plural(kinds[1]), kinds[1], sum(item.shape == kinds[1] for item in items)))
        forms.append(
            _counted(src, f"{tones[0]} shapes", f"{tones[0]} shape", sum(item.colour == tones[0] for item in items))
        )
    if src.chance(0.15):
        forms.insert(0, _counted(src, _plural(kinds[2]), kinds[2], 0))
    first = src.integer(0, len(forms) - 1)
    chosen = forms.pop(first)
    src.rng.shuffle(forms)
    return Asked([picture], *chosen, forms)


def _counted(src: Source, many: str, single: str, number: int) -> tuple[str, str]:
    answer = f"There is one {single}." if number == 1 else f"There are {NUMBER_WORDS[number]} {many}."
    return src.ask(_COUNT, s=many), answer


def digits(src: Source) -> Asked:
    while True:
        length = src.integer(1, 5)
        number = str(src.integer(10 ** (length - 1) if length > 1 else 0, 10**length - 1))
        if length < 3 or is_held_out(number) == src.held_out:
            break
    size = src.pick([size for size in SIZES if size[0] >= (96 if length < 4 else 112)])
    return Asked([lettering(src, number, size)], src.ask(_NUMBER), f"The number is {number}.")


def words(src: Source) -> Asked:
    while True:
        word = src.word()
        if src.held_out and src.chance(0.5):
            word = src.pick(RARE)
        if word.isascii() and word.isalpha() and 2 <= len(word) <= 8:
            break
    roll = src.rng.random()
    word = word.lower() if roll < 0.55 else word.capitalize() if roll < 0.75 else word.upper()
    size = src.pick([size for size in SIZES if size[0] >= (112 if len(word) < 6 else 128)])
    return Asked([lettering(src, word, size)], src.ask(_WORD), f'It says "{word}".')


# two pictures, and clips


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
