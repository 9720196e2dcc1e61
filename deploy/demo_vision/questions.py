"""Conversations about pictures. Each has one right answer in one wording, so that a measurement compares text.

`python -m deploy.demo_vision.questions 5 FOLDER` writes samples.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deploy.demo_model.corpus.words import RARE, Source, is_held_out
from PIL import Image

from .pictures import CLIP_SIZES, COLOURS, SHAPES, SIZES, Item, clip, lettering, scene

SEED: Final = 20261122
NUMBER_WORDS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BACKGROUNDS: Final = ("white", "white", "white", "black", "gray", "yellow", "pink", "blue", "green")
# Pairs that a reader could mix up when one lies on the other.
CLOSE: Final = (
    {"white", "yellow"}, {"yellow", "orange"}, {"red", "orange"}, {"pink", "red"}, {"pink", "purple"}, {"pink", "white"}, {"brown", "red"}, {"brown", "black"}, {"purple", "blue"},
    {"gray", "white"}, {"gray", "pink"}, {"black", "purple"}, {"green", "gray"}, {"blue", "black"}, {"brown", "gray"}, {"brown", "purple"}, {"orange", "brown"}, {"green", "brown"}, {"green", "blue"},
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Clip:
    """A video: frames and how many of them a second."""

    frames: list[Image.Image]
    fps: float


Medium = Image.Image | Clip


@dataclass(slots=True)
class VisionSample:
    """One conversation; its last message is the answer. `media` are in the order of the parts that stand for them."""

    category: str
    messages: list[dict[str, Any]]
    media: list[Medium]
    tools: list[dict[str, Any]] | None = None
    # Every question after the first about the same media, each with its answer.
    thinking: bool = field(default=False)


@dataclass(slots=True)
class Asked:
    """A question: pictures, the request, the answer, and further questions about the same pictures."""

    media: list[Medium]
    request: str
    answer: str
    more: list[tuple[str, str]] = field(default_factory=list)


def _colour(src: Source, *apart: str) -> str:
    while True:
        colour = src.pick(tuple(COLOURS))
        if all(colour != other and {colour, other} not in CLOSE for other in apart):
            return colour


def _an(name: str) -> str:
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"


def _plural(shape: str) -> str:
    return f"{shape}es" if shape == "cross" else f"{shape}s"


def _one(src: Source, background: str, *, low: float = 0.2, high: float = 0.42) -> Item:
    radius = src.rng.uniform(low, high)
    margin = radius + 0.03
    spread = max(0.0, 0.5 - margin)
    return Item(
        src.pick(SHAPES),
        _colour(src, background),
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
        item = _one(src, ground)
        asked = Asked(
            [scene(src, [item], ground, size)],
            src.ask(_WHAT),
            f"{_an(item.name).capitalize()} on {_an(ground)} background.",
        )
        asked.more = _about(src, item, ground)
        return asked
    first, second = _pair(src, ground)
    return Asked(
        [scene(src, [first, second], ground, size)],
        src.ask(_WHAT),
        f"{_an(first.name).capitalize()} and {_an(second.name)}.",
        _relations(src, first, second),
    )


def _about(src: Source, item: Item, ground: str) -> list[tuple[str, str]]:
    return [
        (src.ask(_SHAPE), f"It is {_an(item.shape)}."),
        (src.ask(_COLOUR, s=item.shape), f"The {item.shape} is {item.colour}."),
        (src.ask(_GROUND, s=item.shape), f"The background is {ground}."),
    ]


def shape(src: Source) -> Asked:
    ground = src.pick(BACKGROUNDS)
    item = _one(src, ground, low=0.14)
    return Asked(
        [scene(src, [item], ground, src.pick(SIZES))],
        src.ask(_SHAPE),
        f"It is {_an(item.shape)}.",
        _about(src, item, ground)[1:],
    )


def colour(src: Source) -> Asked:
    ground = src.pick(BACKGROUNDS)
    if src.chance(0.5):
        item = _one(src, ground, low=0.14)
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
    """Two shapes with different names, the first left of or above the second."""
    shapes = src.sample(SHAPES, 2)
    r = [src.rng.uniform(0.13, 0.2) for _ in shapes]
    colours = [_colour(src, ground)]
    colours.append(_colour(src, ground, colours[0]) if src.chance(0.9) else colours[0])
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
    """Questions about where two shapes of `_pair` are."""
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
            f"{_an(first.name).capitalize()}.",
        ),
        (
            src.ask(
                ("What is {w} the {s}?", "Which shape is {w} the {s}?", "What do you see {w} the {s}?"), w=after, s=one
            ),
            f"{_an(second.name).capitalize()}.",
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
    item = _one(src, ground, low=0.11, high=0.16)
    # The radius is a share of the shorter side, so it stays inside on every side.
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
    """Centres and radii of `count` shapes that do not touch."""
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
    tones = [_colour(src, ground)]
    tones.append(_colour(src, ground, tones[0]))
    if roll < 0.5:  # all alike in shape
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


def two_pictures(src: Source) -> Asked:
    grounds = [src.pick(BACKGROUNDS) for _ in range(2)]
    sizes = [src.pick(SIZES) for _ in range(2)]
    roll = src.rng.random()
    order = ("first", "second")
    if roll < 0.3:  # larger or smaller
        shape_, radii = src.pick(SHAPES), [src.rng.uniform(0.12, 0.2), src.rng.uniform(0.32, 0.42)]
        src.rng.shuffle(radii)
        size = src.pick(SIZES)
        items = [Item(shape_, _colour(src, ground), 0.5, 0.5, r) for ground, r in zip(grounds, radii, strict=True)]
        larger = src.chance(0.6)
        which = radii.index(max(radii) if larger else min(radii))
        word = src.pick(("larger", "bigger")) if larger else "smaller"
        request = src.ask(
            ("Which {s} is {w}?", "Which picture has the {w} {s}?", "In which image is the {s} {w}?"), s=shape_, w=word
        )
        return Asked(
            [scene(src, [item], ground, size) for item, ground in zip(items, grounds, strict=True)],
            request,
            f"The one in the {order[which]} picture.",
        )
    items = [_one(src, ground) for ground in grounds]
    while items[0].shape == items[1].shape and roll < 0.8:
        items[1] = _one(src, grounds[1])
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
            n=order[which],
        )
        other = src.ask(("What is in the {n} picture?", "Describe the {n} image."), n=order[1 - which])
        return Asked(
            media, request, f"{_an(item.name).capitalize()}.", [(other, f"{_an(items[1 - which].name).capitalize()}.")]
        )
    if roll < 0.8:
        request = src.ask(
            (
                "Which picture shows {s}?",
                "Which picture has {s}?",
                "In which image is {s}?",
                "Which of the two pictures shows {s}?",
            ),
            s=_an(item.shape),
        )
        return Asked(media, request, f"The {order[which]} picture.")
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
        f"Yes, both show {_an(items[0].shape)}." if same else f"No, {_an(items[0].shape)} and {_an(items[1].shape)}.",
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
        _colour(src, ground),
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
    forms = [(asked, _CHANGES[change]), (what, f"{_an(item.name).capitalize()}.")]
    if src.chance(0.15) and not src.held_out:
        forms.reverse()
    return Asked([taken], *forms[0], forms[1:])


SKILLS: Final[tuple[tuple[str, Callable[[Source], Asked], float], ...]] = (
    ("described", described, 10.0), ("shape", shape, 6.0), ("colour", colour, 8.0), ("count", count, 16.0), ("position", position, 15.0), ("digits", digits, 14.0), ("words", words, 32.0),
    ("two pictures", two_pictures, 12.0), ("motion", motion, 9.0),
)  # fmt: skip
CATEGORIES: Final = tuple(name for name, _, _ in SKILLS)

_SYSTEMS: Final = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "Answer briefly.",
    "You describe pictures.",
    "You are a careful assistant that answers questions.",
    "Be concise.",
    "You are an assistant that can see.",
)
_TOOL_NAMES: Final = (
    ("Read", "file_path", "Reads a file; images are shown."), ("view_image", "path", "Shows an image."), ("read_file", "path", "Reads a file or a picture."), ("screenshot", "name", "Takes a screenshot."),
    ("open_image", "file", "Opens a picture."), ("get_image", "id", "Fetches an image."),
)  # fmt: skip
_READ: Final = ("Read {f} and tell me: {q}", "Look at {f}. {q}", "{q} The picture is {f}.", "Open {f}. {q}")


def parts(src: Source, media: list[Medium], text: str) -> list[dict[str, Any]]:
    """Content of a user's message: pictures mostly before the text."""
    shown: list[dict[str, Any]] = [{"type": "video" if isinstance(medium, Clip) else "image"} for medium in media]
    words_ = {"type": "text", "text": text}
    roll = src.rng.random()
    if roll < 0.68:
        return [*shown, words_]
    if roll < 0.92 or len(shown) < 2:
        return [words_, *shown]
    return [shown[0], {"type": "text", "text": "\n"}, *shown[1:], words_]


def make(src: Source, category: str | None = None) -> VisionSample:
    """One conversation. Without a category, one of the mix that training uses."""
    if category is None:
        category = src.weighted([(name, weight) for name, _, weight in SKILLS])
    asked = next(skill for name, skill, _ in SKILLS if name == category)(src)
    messages: list[dict[str, Any]] = []
    if src.chance(0.3):
        messages.append({"role": "system", "content": src.pick(_SYSTEMS)})
    if src.chance(0.08) and not isinstance(asked.media[0], Clip):
        return _by_tool(src, category, asked, messages)
    messages.append({"role": "user", "content": parts(src, asked.media, asked.request)})
    messages.append({"role": "assistant", "content": asked.answer})
    if asked.more and not src.held_out and src.chance(0.3):
        for request, answer in asked.more[: src.integer(1, 2)]:
            messages += [{"role": "user", "content": request}, {"role": "assistant", "content": answer}]
    return VisionSample(category, messages, asked.media)


def _by_tool(src: Source, category: str, asked: Asked, messages: list[dict[str, Any]]) -> VisionSample:
    """The same question about a picture that a tool returns."""
    name, argument, about = src.pick(_TOOL_NAMES)
    file = f"{src.coined(1, 2)}.{src.pick(('png', 'jpg', 'jpeg', 'webp'))}"
    if src.chance(0.4):
        file = f"/{src.coined(1, 2)}/{file}"
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    tools = [{"type": "function", "function": {"name": name, "description": about, "parameters": schema}}]
    call = {"type": "function", "function": {"name": name, "arguments": json.dumps({argument: file})}}
    messages += [
        {"role": "user", "content": src.pick(_READ).format(f=file, q=asked.request)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "image"} for _ in asked.media]},
        {"role": "assistant", "content": asked.answer},
    ]
    return VisionSample(category, messages, asked.media, tools)


def training_sample(seed: int, batch: int, index: int) -> VisionSample:
    return make(Source(f"vision {seed} {batch} {index}"))


def held_out_samples(category: str, number: int, seed: int = SEED) -> list[VisionSample]:
    """Renderings, words and long numbers that are never in training."""
    return [
        make(Source(f"vision held out {seed} {category} {index}", held_out=True), category) for index in range(number)
    ]


def main() -> None:
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(number):
        sample = training_sample(SEED, 0, index)
        for place, medium in enumerate(sample.media):
            frames = medium.frames if isinstance(medium, Clip) else [medium]
            for frame, picture in enumerate(frames):
                picture.save(folder / f"{index}-{place}-{frame}.png")
        print(index, sample.category, json.dumps(sample.messages, ensure_ascii=False))


if __name__ == "__main__":
    main()
