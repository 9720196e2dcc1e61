"""Answers of the model that ships: media from the bytes of a request to the words about them."""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from PIL import Image

from protocol.failures import Code
from protocol.to_worker import ChatPrompt, Generate, Media, Sampling
from tests.support.engine import EngineHarness, Result, spec
from tests.support.pictures import BLUE, RED, encoded, shape, spoiled


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineHarness]:
    with EngineHarness(spec(Path("demo-vision"), batching="together")) as engine:
        yield engine


def media(kind: str, data: bytes, **options: int) -> Media:
    return Media(kind, blake2b(data, digest_size=32).digest(), data, dict(options), "messages[0].content[0]")


def picture(kind: str, color: tuple[int, int, int]) -> Media:
    return media("image", encoded(shape(kind, color)))


def clip(images: Sequence[Image.Image]) -> Media:
    files = [encoded(image, "JPEG", quality=95) for image in images]
    return media("video", b"".join(struct.pack(">I", len(file)) + file for file in files), frames=len(files))


def request(rid: int, messages: list[dict[str, Any]], *shown: Media) -> Generate:
    return Generate(rid, ChatPrompt(messages, media=shown), Sampling(temperature=0.0), max_tokens=10)


def question(rid: int, words: str, *shown: Media) -> Generate:
    parts = [{"type": medium.kind, "media": index} for index, medium in enumerate(shown)]
    return request(rid, [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}], *shown)


def texts(results: Sequence[Result]) -> list[str]:
    return [result.text for result in results]


def test_questions_about_pictures_are_answered_side_by_side_and_beside_text(engine: EngineHarness) -> None:
    results = engine.run(
        [
            question(1, "What shape is in the picture?", picture("circle", RED)),
            question(2, "What shape is in the picture?", picture("square", RED)),
            question(3, "What color is the shape?", picture("square", BLUE)),
            Generate(4, ChatPrompt([{"role": "user", "content": "Hello!"}]), Sampling(temperature=0.0), max_tokens=10),
        ]
    )

    assert texts(results)[:3] == ["It is a circle.", "It is a square.", "The shape is blue."]
    assert results[3].text
    assert [(result.usage.image_tokens if result.usage else None) for result in results] == [64, 64, 64, 0]


@pytest.mark.soak
def test_a_clip_and_its_reverse_move_in_opposite_ways(engine: EngineHarness) -> None:
    images = [shape("circle", RED, x, side=96) for x in (4, 24, 44, 64)]
    forth, back = (clip(order) for order in (images, images[::-1]))
    results = engine.run(
        [question(11, "Which way does the shape move?", forth), question(12, "Which way does the shape move?", back)]
    )

    assert texts(results) == ["It moves to the right.", "It moves to the left."]
    assert [result.usage.video_tokens for result in results if result.usage] == [72, 72]


def test_that_a_picture_was_seen_is_not_to_be_told_by_the_time_under_another_salt(engine: EngineHarness) -> None:
    """Neither decoded nor encoded media, nor those that are on their way, are shared: a hit would be quicker."""
    shown = media("image", encoded(shape("triangle", BLUE, side=32)))
    counts = [engine.gauges.features.media_encoded]
    for rid, salts in ((31, ("ours", "theirs")), (33, ("ours",))):
        asked = structs.replace(question(rid, f"What is in picture {rid}?", shown), max_tokens=1)
        engine.run([structs.replace(asked, rid=rid + at, cache_salt=salt) for at, salt in enumerate(salts)])
        counts.append(engine.gauges.features.media_encoded)
    assert [after - before for before, after in pairwise(counts)] == [2, 0]


@pytest.mark.soak
def test_a_picture_in_the_result_of_a_tool_is_seen(engine: EngineHarness) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": {"path": "a.png"}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What shape is in the picture?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "name": "read", "content": [{"type": "image", "media": 0}]},
        {"role": "user", "content": "What shape is in the picture?"},
    ]
    [result] = engine.run([request(21, messages, picture("square", BLUE))])

    assert "square" in result.text


def test_a_file_that_cannot_be_decoded_fails_alone_and_names_its_part(engine: EngineHarness) -> None:
    broken = media("image", spoiled(encoded(Image.effect_noise((64, 64), 90))))
    failed, answered = engine.run(
        [question(41, "What is it?", broken), question(42, "What color is the shape?", picture("square", BLUE))]
    )

    assert failed.failure is not None
    assert (failed.failure.code, failed.failure.param) == (Code.INVALID_IMAGE, "messages[0].content[0]")
    assert failed.text == ""
    assert answered.text == "The shape is blue."
