"""Held-out renderings of each kind, asked of demo-vision as mlxd serves it."""

import struct
from collections.abc import Iterator
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from deploy.demo_vision.questions import Clip
from deploy.demo_vision.samples import CATEGORIES, VisionSample, held_out_samples
from protocol.to_worker import ChatPrompt, Generate, Media, Sampling
from tests.support.engine import EngineHarness, spec

# Of each category.
NUMBER = 40
# Share of the answers that must be right, to the letter, where there are enough of them to say.
WANTED = {"shape": 0.95, "colour": 0.95, "digits": 0.95, "count": 0.9, "position": 0.9}
LEAST = 0.85


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineHarness]:
    with EngineHarness(spec(Path("demo-vision"), batching="together")) as engine:
        yield engine


def file_of(image: Image.Image, kind: str) -> bytes:
    stream = BytesIO()
    image.convert("RGB").save(stream, kind, **({"quality": 98} if kind == "JPEG" else {}))
    return stream.getvalue()


def medium(shown: Any) -> Media:
    if isinstance(shown, Clip):
        files = [file_of(frame, "JPEG") for frame in shown.frames]
        data = b"".join(struct.pack(">I", len(file)) + file for file in files)
        return Media("video", blake2b(data, digest_size=32).digest(), data, {"frames": len(files), "fps": shown.fps})
    data = file_of(shown, "PNG")
    return Media("image", blake2b(data, digest_size=32).digest(), data)


def request(rid: int, sample: VisionSample) -> Generate:
    """All but the answer, with its media numbered in their order."""
    count = iter(range(len(sample.media)))
    messages: list[dict[str, Any]] = []
    for message in sample.messages[:-1]:
        content = message.get("content")
        if isinstance(content, list):
            content = [part if part["type"] == "text" else {**part, "media": next(count)} for part in content]
        messages.append({**message, "content": content})
    media = tuple(medium(shown) for shown in sample.media)
    prompt = ChatPrompt(messages, sample.tools or [], media=media, thinking=False)
    return Generate(rid, prompt, Sampling(temperature=0.0), max_tokens=64)


@pytest.mark.soak
def test_held_out_pictures_and_clips_are_answered_to_the_letter(engine: EngineHarness) -> None:
    right = dict.fromkeys(CATEGORIES, 0)
    for at, category in enumerate(CATEGORIES):
        samples = held_out_samples(category, NUMBER)
        # The deadline of a run is that of one category, not of all.
        results = engine.run([request(rid, sample) for rid, sample in enumerate(samples, at * NUMBER)])
        for sample, result in zip(samples, results, strict=True):
            right[sample.category] += result.text == sample.messages[-1]["content"]
    assert {name: count for name, count in right.items() if count < WANTED.get(name, LEAST) * NUMBER} == {}
