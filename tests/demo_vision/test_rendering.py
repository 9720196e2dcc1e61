"""Conversations about pictures as token ids, positions and patches."""

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from deploy.demo_model.corpus.generate import training_sample
from deploy.demo_model.tokenizer import Renderer
from deploy.demo_vision.questions import Clip
from deploy.demo_vision.rendering import (
    MARKS,
    conversations,
    patches,
    places,
    positions,
    rendered,
    template,
    vocabulary,
)
from deploy.demo_vision.samples import CATEGORIES, SEED, VisionSample, held_out_samples
from tests.demo_vision.conftest import REPOSITORY

DEMO = REPOSITORY / "worker" / "demo_model"
SHIPPED = REPOSITORY / "worker" / "demo_vision"


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return vocabulary(Tokenizer.from_file(str(DEMO / "tokenizer.json")))


def ask(*media: object) -> VisionSample:
    content = [{"type": "video" if isinstance(medium, Clip) else "image"} for medium in media]
    messages = [
        {"role": "user", "content": [*content, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "It is a star."},
    ]
    return VisionSample("shape", messages, list(media))  # type: ignore[arg-type]


def test_the_same_seed_makes_the_same_conversation() -> None:
    for category in CATEGORIES:
        [one], [two] = held_out_samples(category, 1), held_out_samples(category, 1)
        assert one.messages == two.messages
        for left, right in zip(one.media, two.media, strict=True):
            frames = zip(*(m.frames if isinstance(m, Clip) else [m] for m in (left, right)), strict=True)
            assert all(a.tobytes() == b.tobytes() for a, b in frames)


def test_a_conversation_without_media_is_rendered_as_the_demo_model_does(bpe: Tokenizer) -> None:
    plain = Renderer()
    for index in range(40):
        sample = training_sample(SEED, 0, index)
        text = plain.conversation(sample)
        assert conversations().render(messages=sample.messages, tools=sample.tools) == text
        assert bpe.encode(text).ids == Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids


def test_a_picture_is_a_quarter_as_many_tokens_as_patches(bpe: Tokenizer) -> None:
    row = rendered(bpe, ask(Image.new("RGB", (96, 128))))
    assert row.grids == [(16, 12)]
    assert len(row.first) == 16 * 12
    assert len(row.slots) == 48
    assert set(row.ids[row.slots]) == {bpe.token_to_id("<|image_pad|>")}


def test_a_clip_is_a_group_of_tokens_for_each_two_frames_with_its_time_before_it(bpe: Tokenizer) -> None:
    frames = [Image.new("RGB", (64, 64), (shade, 0, 0)) for shade in (0, 60, 120, 180)]
    row = rendered(bpe, ask(Clip(frames, 2.0)))
    assert row.grids == [(8, 8), (8, 8)]
    assert len(row.slots) == 32
    assert set(row.ids[row.slots]) == {bpe.token_to_id("<|video_pad|>")}
    assert [row.first[0, 0], row.second[0, 0], row.first[64, 0], row.second[64, 0]] == [0, 60, 120, 180]
    text = bpe.decode(row.ids.tolist(), skip_special_tokens=True)
    assert "<0.2 seconds>" in text
    assert "<1.2 seconds>" in text


def test_positions_stand_still_in_a_picture_and_go_on_by_its_longer_side() -> None:
    # Two tokens, a picture of 2 × 3 tokens, one token: as transformers' `get_rope_index` numbers them.
    ids = np.array([5, 6, 9, 9, 9, 9, 9, 9, 7])
    made = positions(ids, np.arange(2, 8), [(4, 6)])
    assert made.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_the_four_patches_of_a_token_are_neighbours() -> None:
    picture = Image.fromarray(np.arange(32 * 32, dtype=np.uint8).reshape(32, 32)).convert("RGB")
    pixels = np.asarray(picture)
    cut = patches(picture).reshape(-1, 3, 8, 8)
    where, _, weight = places(4, 4)
    for patch, (row, column) in zip(cut, where, strict=True):
        assert (patch[0] == pixels[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8, 0]).all()
    assert where[:4].tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert np.allclose(weight.sum(-1), 1)


def test_the_shipped_template_and_tokenizer_are_those_of_the_recipe(bpe: Tokenizer) -> None:
    assert (SHIPPED / "chat_template.jinja").read_text() == template()
    shipped = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    assert shipped.to_str() == bpe.to_str()
    assert [shipped.token_to_id(mark) for mark in MARKS] == [2560, 2561, 2562, 2563]
