"""Prompts with media: ids, spans and positions, with the template and the processor of the model that ships."""

import json
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from PIL import Image

from protocol.failures import Code
from protocol.to_worker import ChatPrompt, Media
from tests.support.pictures import encoded, halves
from worker.errors import RequestInvalid
from worker.model.loader import DEMO_DIR
from worker.prompt.encode import PromptEncoder
from worker.prompt.media_prompt import EncodedPrompt, MediaPrompts
from worker.prompt.templates import Renderer
from worker.vision.families import open_processor
from worker.vision.images import MediaLimits

FOLDER = DEMO_DIR.with_name("demo_vision")
IMAGE, VIDEO = 2562, 2563
PLACEHOLDERS = {"image": IMAGE, "video": VIDEO}
LIMITS = MediaLimits(bytes=1 << 20, count=4, pixels=64_000_000)
START, END = "<|vision_start|>", "<|vision_end|>"


class Model:
    """Prompts of the model that ships, with another template if one is named."""

    def __init__(self, template: str = "", kinds: Sequence[str] = ("image", "video")) -> None:
        tokenizer = load_tokenizer(FOLDER)
        if template:
            tokenizer.chat_template = template
        self.encoder = PromptEncoder(tokenizer)
        config = json.loads((FOLDER / "config.json").read_text())
        placeholders = {kind: PLACEHOLDERS[kind] for kind in kinds}
        self.processor = open_processor(FOLDER, config, lambda text: self.text_ids(text), placeholders, LIMITS)
        renderer = Renderer(tokenizer, self.processor.markers)
        self.prompts = MediaPrompts(self.processor, renderer, placeholders, LIMITS.count, in_space=True)

    def text_ids(self, text: str) -> list[int]:
        return self.encoder.encode(text, add_special_tokens=False)

    def encode(self, *messages: dict[str, Any], media: Sequence[Media]) -> EncodedPrompt:
        prompt = ChatPrompt(list(messages), media=tuple(media))
        return self.prompts.encode(prompt, lambda text, _: self.text_ids(text))


@pytest.fixture(scope="module")
def model() -> Model:
    return Model()


def image(width: int = 96, height: int = 64, kind: str = "PNG", param: str = "") -> Media:
    data = encoded(halves(width, height), kind)
    return Media("image", blake2b(data, digest_size=32).digest(), data, {}, param)


def clip(count: int, **options: float) -> Media:
    files = [encoded(Image.new("RGB", (64, 48), (20 * index, 0, 0)), "JPEG") for index in range(count)]
    data = b"".join(struct.pack(">I", len(file)) + file for file in files)
    return Media("video", blake2b(data, digest_size=32).digest(), data, {"frames": count, **options}, "input[0]")


def user(*content: str | tuple[str, int]) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": part[0], "media": part[1]}
        for part in content
    ]
    return {"role": "user", "content": parts}


def test_an_images_placeholders_stand_between_the_words_around_it(model: Model) -> None:
    found = model.encode(user("one", ("image", 0), "two"), media=[image()])
    [span] = found.spans

    # 96 × 64 pixels are 12 × 8 patches, 4 of which make a token.
    assert (span.end - span.begin, span.first, span.medium.tokens) == (24, 0, 24)
    assert set(found.ids[span.begin : span.end]) == {IMAGE}
    assert found.ids.count(IMAGE) == 24
    before = model.text_ids(found.text.partition("<|image_pad|>")[0] if found.text else "")
    assert found.ids[: span.begin] == before
    assert found.text is not None
    assert f"one{START}<|image_pad|>{END}two" in found.text


def test_images_side_by_side_and_far_apart_have_spans_of_their_own(model: Model) -> None:
    first, second = image(96, 64), image(48, 96)
    found = model.encode(
        user(("image", 1), ("image", 0)), {"role": "assistant", "content": "ok"}, user(("image", 1)),
        media=[first, second],
    )  # fmt: skip

    assert [span.medium.tokens for span in found.spans] == [18, 24, 18]
    assert found.spans[0].medium.key == found.spans[2].medium.key != found.spans[1].medium.key
    assert all(one.end <= other.begin for one, other in zip(found.spans, found.spans[1:], strict=False))
    assert found.ids.count(IMAGE) == 60


def test_positions_follow_the_grids_of_images(model: Model) -> None:
    found = model.encode(user(("image", 0), "x"), media=[image()])
    [span] = found.spans
    assert found.positions is not None
    time, height, width = found.positions[:, span.begin : span.end] - span.begin

    assert found.positions.shape == (3, len(found.ids))
    assert time.tolist() == [0] * 24
    assert height.tolist() == [row for row in range(4) for _ in range(6)]
    assert width.tolist() == [*range(6)] * 4
    assert found.positions[:, span.end].tolist() == [span.begin + 6] * 3


def test_a_clip_has_a_span_a_group_of_frames_and_a_time_before_each(model: Model) -> None:
    found = model.encode(user(("video", 0), "where to?"), media=[clip(4, fps=2.0)])

    assert [span.medium.kind for span in found.spans] == ["video", "video"]
    assert len({span.medium.key for span in found.spans}) == 2
    assert [span.first for span in found.spans] == [0, 0]
    assert found.ids.count(VIDEO) == sum(span.medium.tokens for span in found.spans)
    between = found.ids[found.spans[0].end : found.spans[1].begin]
    assert between[1:-1] == model.text_ids("<1.2 seconds>")
    assert found.positions is not None


def test_a_clip_reversed_is_another_prompt_key_by_key(model: Model) -> None:
    forth = clip(4)
    files = _files(forth.data)
    back = b"".join(struct.pack(">I", len(file)) + file for file in reversed(files))
    reverse = Media("video", blake2b(back, digest_size=32).digest(), back, dict(forth.options))
    one, other = (model.encode(user(("video", 0)), media=[media]) for media in (forth, reverse))

    assert one.ids == other.ids
    assert {span.medium.key for span in one.spans}.isdisjoint({span.medium.key for span in other.spans})
    assert not np.array_equal(
        one.spans[0].medium.load()["pixel_values_videos"], other.spans[0].medium.load()["pixel_values_videos"]
    )


def _files(data: bytes) -> list[bytes]:
    files: list[bytes] = []
    while data:
        (length,) = struct.unpack(">I", data[:4])
        files.append(data[4 : 4 + length])
        data = data[4 + length :]
    return files


def test_a_template_without_clips_gets_frames_as_images_and_says_so() -> None:
    own = (FOLDER / "chat_template.jinja").read_text()
    model = Model(own.replace("'<|vision_start|><|video_pad|><|vision_end|>'", "''"))
    found = model.encode(user("look", ("video", 0)), media=[clip(5, fps=1.0)])

    assert model.prompts.modalities == ("image", "video")
    assert [span.medium.kind for span in found.spans] == ["image"] * 5
    assert found.deviations == ("video-as-5-images",)


def test_markers_that_are_typed_make_no_span(model: Model) -> None:
    typed = f"{START}<|image_pad|>{END} and <|video_pad|>"
    found = model.encode(user(typed, ("image", 0), typed), media=[image()])

    assert len(found.spans) == 1
    assert found.ids.count(IMAGE) == 24
    assert VIDEO not in found.ids


def test_the_same_picture_in_other_words_is_the_same_medium(model: Model) -> None:
    one, other = (model.encode(user(("image", 0), words), media=[image()]) for words in ("a", "b c"))

    assert one.spans[0].medium.key == other.spans[0].medium.key


@pytest.mark.parametrize(
    ("media", "code"),
    [
        (Media("audio", b"", b"RIFF", {}, "messages[0].content[1]"), Code.UNSUPPORTED_MODALITY),
        (Media("image", b"", b"<svg/>", {}, "messages[0].content[1]"), Code.INVALID_IMAGE),
        (Media("image", b"", b"x" * (LIMITS.bytes + 1), {}, "messages[0].content[1]"), Code.IMAGE_TOO_LARGE),
    ],
)
def test_refusals_name_the_part(model: Model, media: Media, code: Code) -> None:
    with pytest.raises(RequestInvalid) as caught:
        model.encode(user("x", (media.kind, 0)), media=[media])

    assert (caught.value.failure.code, caught.value.failure.param) == (code, "messages[0].content[1]")
