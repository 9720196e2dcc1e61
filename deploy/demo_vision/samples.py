"""Conversations about pictures, for training and for held-out measurements."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from deploy.demo_model.corpus.words import Source

from .questions import (
    Asked,
    Clip,
    Medium,
    colour,
    count,
    described,
    digits,
    motion,
    position,
    shape,
    two_pictures,
    words,
)

SEED: Final = 20261122


@dataclass(slots=True)
class VisionSample:
    """Conversation whose last message is the answer. `media` are in the order of the content parts that refer to
    them."""

    category: str
    messages: list[dict[str, Any]]
    media: list[Medium]
    tools: list[dict[str, Any]] | None = None


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
    """Return the content of a user's message; pictures are mostly before the text."""
    shown: list[dict[str, Any]] = [{"type": "video" if isinstance(medium, Clip) else "image"} for medium in media]
    words_ = {"type": "text", "text": text}
    roll = src.rng.random()
    if roll < 0.68:
        return [*shown, words_]
    if roll < 0.92 or len(shown) < 2:
        return [words_, *shown]
    return [shown[0], {"type": "text", "text": "\n"}, *shown[1:], words_]


def make(src: Source, category: str | None = None) -> VisionSample:
    """Return one conversation. Without a category, draw the category as often as in training."""
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
    """Return the question about a picture that a tool returns."""
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
    """Return samples whose renderings, words and long numbers are never used in training."""
    return [
        make(Source(f"vision held out {seed} {category} {index}", held_out=True), category) for index in range(number)
    ]
