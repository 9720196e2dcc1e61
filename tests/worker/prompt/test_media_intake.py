"""Requests with media to rows, by the model that ships, and refusals by models that take none."""

import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from protocol.failures import Code, Failure
from protocol.to_worker import ChatPrompt, Generate, Media, Sampling, Tokenize
from tests.support.engine import spec
from tests.support.pictures import encoded, halves
from worker.engine.row import Row
from worker.errors import RequestInvalid
from worker.model.loader import load
from worker.prompt.intake import Intake
from worker.prompt.media_prompt import MediaPrompts
from worker.vision.images import MediaLimits

LIMITS = MediaLimits(bytes=1 << 20, count=2, pixels=1_000_000)


@pytest.fixture(scope="module")
def intake() -> Intake:
    return Intake(load(spec(Path("demo-vision"), context=400), lambda *_: None), limits=LIMITS)


def image(width: int = 96, height: int = 64, param: str = "messages[0].content[1]") -> Media:
    data = encoded(halves(width, height))
    return Media("image", blake2b(data, digest_size=32).digest(), data, {}, param)


def chat(*media: Media, text: str = "what is it?") -> ChatPrompt:
    shown: list[dict[str, Any]] = [{"type": medium.kind, "media": index} for index, medium in enumerate(media)]
    return ChatPrompt([{"role": "user", "content": [{"type": "text", "text": text}, *shown]}], media=media)


def row(intake: Intake, prompt: ChatPrompt) -> Row:
    return intake.row(Generate(1, prompt, Sampling()), time.monotonic())


def refused(intake: Intake, prompt: ChatPrompt) -> Failure:
    with pytest.raises(RequestInvalid) as caught:
        row(intake, prompt)
    return caught.value.failure


def test_a_row_knows_its_media_their_places_and_their_tokens(intake: Intake) -> None:
    made = row(intake, chat(image(), image(64, 96)))

    assert intake.media.modalities == ("image", "video")
    assert [span.medium.tokens for span in made.media] == [24, 24]
    assert made.positions is not None
    assert made.positions.shape == (3, len(made.prompt))
    usage = made.usage(time.monotonic())
    assert (usage.prompt, usage.image_tokens, usage.video_tokens) == (len(made.prompt), 48, 0)
    assert not any(span.begin < at < span.end for span in made.media for at in made.boundaries)


def test_media_are_known_by_their_content_and_the_salt_of_their_request(intake: Intake) -> None:
    def key(salt: str) -> bytes:
        made = intake.row(Generate(1, chat(image()), Sampling(), cache_salt=salt), time.monotonic())
        return made.media[0].medium.key

    keys = [key(salt) for salt in ("", "ours", "theirs")]
    assert len(set(keys)) == 3
    assert [key(salt) for salt in ("", "ours", "theirs")] == keys


def test_counted_tokens_are_those_of_the_prompt(intake: Intake) -> None:
    prompt = chat(image(), image(64, 96))
    counted = intake.tokenize(Tokenize(1, prompt, want_ids=True), lambda: True)

    assert counted is not None
    assert list(counted.ids) == row(intake, prompt).prompt
    assert counted.count == len(counted.ids)


def test_text_alone_is_a_row_as_ever(intake: Intake) -> None:
    made = row(intake, ChatPrompt([{"role": "user", "content": "hello"}]))

    assert (made.media, made.positions, made.deviations) == ([], None, ())


def test_media_that_leave_no_room_are_refused_in_the_words_clients_know(intake: Intake) -> None:
    failure = refused(intake, chat(image(), text="word " * 500))
    assert failure.code is Code.CONTEXT_LENGTH_EXCEEDED

    small = Intake(load(spec(Path("demo-vision"), context=40), lambda *_: None))
    assert refused(small, chat(image(), image())).code is Code.CONTEXT_LENGTH_EXCEEDED


def test_more_media_than_are_taken_are_refused_at_the_first_too_many(intake: Intake) -> None:
    failure = refused(intake, chat(image(), image(), image(param="messages[0].content[3]")))

    assert (failure.code, failure.param) == (Code.TOO_MANY_MEDIA, "messages[0].content[3]")


def test_an_image_beyond_the_bound_is_refused_by_its_header(intake: Intake) -> None:
    failure = refused(intake, chat(image(1001, 1000)))

    assert (failure.code, failure.param) == (Code.IMAGE_TOO_LARGE, "messages[0].content[1]")


def test_a_model_without_towers_refuses_media_and_says_why(model_folder: Callable[[str], Path]) -> None:
    text = Intake(load(spec(model_folder("qwen3")), lambda *_: None))
    failure = refused(text, chat(image()))

    assert text.media.modalities == ()
    assert (failure.code, failure.param) == (Code.UNSUPPORTED_MODALITY, "messages[0].content[1]")
    assert "text alone" in failure.message


def test_what_an_image_costs_is_known_before_one_comes(intake: Intake) -> None:
    assert isinstance(intake.media, MediaPrompts)
    # 1,024 × 1,024 pixels are reduced to 128 × 128: 16 × 16 patches, 4 of which make a token.
    assert (intake.media.processor.max_pixels, intake.media.processor.image_tokens) == (128 * 128, 64)
