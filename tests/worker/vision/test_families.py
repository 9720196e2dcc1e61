"""Processors: what a header says of an image is what its pixels make, for every family."""

import json
import math
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.utils import load_tokenizer
from PIL import Image

from protocol.failures import Code
from protocol.to_worker import Media
from tests.support.pictures import BLUE, RED, encoded, halves, spoiled
from tests.support.processors import FAMILIES, build
from tests.worker.vision.test_sounds import tone, wav
from worker.errors import RequestInvalid
from worker.prompt.encode import PromptEncoder
from worker.vision.checkpoint import UnsupportedVision
from worker.vision.families import PreparedMedia, Processor, expanded, most_pixels, open_processor
from worker.vision.images import MediaLimits

# Of transformers, about the filters that Gemma 4 was trained with.
pytestmark = pytest.mark.filterwarnings("ignore:At least one mel filter")

LIMITS = MediaLimits(bytes=1 << 20, count=4, pixels=64_000_000)
SIZES = ((64, 48), (40, 150), (333, 90), (17, 16))
Open = Callable[[str], Processor]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """A family's processor, opened once."""
    known: dict[str, Processor] = {}

    def get(family: str) -> Processor:
        if family not in known:
            known[family] = open_family(family, tmp_path_factory.mktemp(family))
        return known[family]

    return get


def open_family(family: str, folder: Path, files: dict[str, Any] | None = None, **changes: Any) -> Processor:
    placeholders = build(family, folder)
    for name, content in (files or {}).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    encoder = PromptEncoder(load_tokenizer(folder))
    config = {"model_type": family, **FAMILIES[family][3]}
    return open_processor(
        folder, config, lambda text: encoder.encode(text, add_special_tokens=True), placeholders, LIMITS, **changes
    )


def media(data: bytes, kind: str = "image", **options: float) -> Media:
    return Media(kind, bytes([len(data) % 256]) * 32, data, dict(options), "messages[0].content[1]")


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def frames(*images: Image.Image, **options: float) -> Media:
    files = [encoded(image, "JPEG", quality=95) for image in images]
    data = b"".join(struct.pack(">I", len(file)) + file for file in files)
    return media(data, "video", frames=len(files), **options)


def rows(family: str, inputs: dict[str, Any]) -> int:
    """Rows of features that a tower of this family makes of its inputs."""
    match family:
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_5":
            [grid] = inputs.get("image_grid_thw", inputs.get("video_grid_thw"))
            assert len(inputs.get("pixel_values", inputs.get("pixel_values_videos"))) == grid.prod()
            return int(grid.prod()) // 4
        case "gemma3" | "gemma3n":
            # Gemma 3n's tower embeds the marker behind an image too.
            return 4 * len(inputs["pixel_values"]) + (family == "gemma3n")
        case "gemma4_unified":
            return int((inputs["image_position_ids"][..., 0] >= 0).sum())
        case "idefics3" | "smolvlm":
            return 4 * inputs["pixel_values"].shape[1]
        case "llava":
            return len(inputs["pixel_values"]) * 16
        case "pixtral" | "mistral3":
            side = 8 if family == "pixtral" else 16
            return int(np.prod(np.asarray(inputs["image_sizes"][0]) // side))
        case "lfm2_vl":
            return sum(math.ceil(high / 2) * math.ceil(wide / 2) for high, wide in inputs["spatial_shapes"].tolist())
        case "gemma4":
            return inputs["pixel_values"].shape[-2] * inputs["pixel_values"].shape[-1] // 16**2
        case _:
            raise AssertionError(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_that_a_header_promises_are_those_that_pixels_make(opened: Open, family: str) -> None:
    processor = opened(family)
    for width, height in SIZES:
        prepared = processor.read(media(encoded(noise(width, height))))
        [image] = prepared.media

        assert image.tokens == prepared.tokens == rows(family, image.load()), (width, height)
        assert prepared.text.count(FAMILIES[family][0][0]) == len(prepared.runs)


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_numbers_of_numpy_by_the_names_of_the_tower(opened: Open, family: str) -> None:
    inputs = opened(family).read(media(encoded(noise(64, 48)))).media[0].load()

    assert "pixel_values" in inputs
    assert all(isinstance(value, np.ndarray) and value.dtype != object for value in inputs.values())
    assert inputs["pixel_values"].dtype == np.float32


def test_a_layout_that_differs_from_its_processors_is_found_at_load(tmp_path: Path) -> None:
    build("gemma3", tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    with pytest.raises(UnsupportedVision) as caught:
        open_processor(tmp_path, {"model_type": "gemma3"}, tokenizer.encode, {"image": 5}, LIMITS)

    assert "processor" in str(caught.value)


@pytest.mark.parametrize(("family", "said"), [("mllama", "mllama"), ("qwen3_vl", "cannot be used")])
def test_a_model_without_a_processor_is_refused_with_the_reason(tmp_path: Path, family: str, said: str) -> None:
    with pytest.raises(UnsupportedVision) as caught:
        open_processor(tmp_path, {"model_type": family}, lambda _: [1], {"image": 1}, LIMITS)

    assert said in str(caught.value)


def test_keys_follow_bytes_and_options_and_nothing_else(opened: Open) -> None:
    data = encoded(noise(64, 48))
    processor = opened("qwen3_vl")
    first, again = processor.read(media(data)), processor.read(Media("image", media(data).digest, data, {}, "other"))

    def key(prepared: PreparedMedia) -> bytes:
        return prepared.media[0].key

    assert key(first) == key(again)
    assert key(processor.read(media(data, max_pixels=2048))) != key(first)
    assert key(processor.read(Media("image", b"\1" * 32, data))) != key(first)


@pytest.mark.parametrize("family", ["qwen3_vl", "pixtral", "idefics3", "lfm2_vl", "gemma4"])
def test_fewer_pixels_are_taken_where_the_request_asks_for_fewer(opened: Open, family: str) -> None:
    data = encoded(noise(120, 120))
    processor = opened(family)
    whole, small = processor.read(media(data)), processor.read(media(data, max_pixels=24 * 24))

    assert small.tokens <= whole.tokens
    assert small.tokens == rows(family, small.media[0].load())


def test_memory_bounds_the_pixels_of_an_image(tmp_path: Path) -> None:
    # 4 heads × (2048 pixels / 64)² × 4 bytes are an eighth of 128 KiB.
    processor = open_family("qwen2_5_vl", tmp_path, memory_bytes=128 << 10)
    image = processor.read(media(encoded(noise(200, 200))))

    assert processor.max_pixels == 2048
    assert image.tokens == rows("qwen2_5_vl", image.media[0].load()) <= 8
    assert processor.read(media(encoded(noise(200, 200)), max_pixels=10**9)).tokens == image.tokens
    assert most_pixels({"vision_config": {"num_heads": 4}}, 8, (128 << 10) + 5000) == 2048
    clip = processor.read(frames(*(noise(400, 400, seed) for seed in range(2))))
    assert rows("qwen2_5_vl", clip.media[0].load()) == clip.tokens <= 8


def test_memory_bounds_no_image_that_is_cut_into_tiles(tmp_path: Path) -> None:
    processor = open_family("idefics3", tmp_path, memory_bytes=64 << 10)

    assert processor.read(media(encoded(noise(120, 120)))).tokens > 4
    assert processor.max_pixels == 0


def test_crops_of_a_long_image_are_counted_where_a_processor_makes_them(tmp_path: Path) -> None:
    ways = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 4}
    _, files, _, _ = FAMILIES["gemma3"]
    scanning = files["preprocessor_config"] | ways | {"pan_and_scan_min_ratio_to_activate": 1.2}
    processor = open_family("gemma3", tmp_path, files={"preprocessor_config": scanning})
    image = processor.read(media(encoded(noise(40, 150))))

    assert image.runs == (4,) * 5
    assert "here are some crops" in image.text
    assert rows("gemma3", image.media[0].load()) == image.tokens


def test_a_photo_taken_sideways_has_the_grid_of_how_it_is_shown(opened: Open) -> None:
    exif = Image.Exif()
    exif[274] = 6
    image = opened("qwen3_vl").read(media(encoded(noise(48, 96), "JPEG", exif=exif))).media[0]

    assert image.load()["image_grid_thw"].tolist() == [[1, 6, 12]]


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (encoded(noise(4, 40)), Code.INVALID_IMAGE, "side below 8"),
        (encoded(noise(8, 1700)), Code.INVALID_IMAGE, "200 times"),
        (b"", Code.INVALID_IMAGE, "empty"),
    ],
)
def test_images_that_a_model_cannot_see_are_refused_with_their_place(
    opened: Open, data: bytes, code: Code, said: str
) -> None:
    with pytest.raises(RequestInvalid) as caught:
        opened("qwen3_vl").read(media(data))

    assert (caught.value.failure.code, caught.value.failure.param) == (code, "messages[0].content[1]")
    assert said in caught.value.failure.message


def test_a_file_that_cannot_be_decoded_is_refused_when_it_is_loaded(opened: Open) -> None:
    image = opened("qwen3_vl").read(media(spoiled(encoded(noise(64, 48))))).media[0]
    with pytest.raises(RequestInvalid) as caught:
        image.load()

    assert caught.value.failure.param == "messages[0].content[1]"


def test_frames_of_a_clip_come_in_groups_with_their_times(opened: Open) -> None:
    clip = opened("qwen3_vl").read(frames(*(noise(64, 48, seed) for seed in range(5)), fps=2.0))
    group = "<|vision_start|><|video_pad|><|vision_end|>"

    # Of five frames the processor takes four, in groups of two, over the whole clip.
    assert clip.text == f"<0.2 seconds>{group}<1.8 seconds>{group}"
    assert len(clip.media) == len(clip.runs) == len(clip.grids) == 2
    for medium in clip.media:
        assert medium.kind == "video"
        assert rows("qwen3_vl", medium.load()) == medium.tokens


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_groups_of_a_clip_hold_the_patches_of_the_whole_clip(opened: Open, family: str) -> None:
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLVideoProcessor

    processor = opened(family)
    pictures = [noise(64, 48, seed) for seed in range(4)]
    clip = processor.read(frames(*pictures))
    videos: Any = processor._layout._videos  # pyright: ignore
    assert isinstance(videos, Qwen3VLVideoProcessor)
    # As JPEG has them.
    shown = [np.asarray(Image.open(BytesIO(encoded(picture, "JPEG", quality=95)))) for picture in pictures]
    whole = videos([np.stack(shown).transpose(0, 3, 1, 2)])

    parts = [medium.load()["pixel_values_videos"] for medium in clip.media]
    assert np.array_equal(np.concatenate(parts), whole["pixel_values_videos"])
    assert len(clip.media) == whole["video_grid_thw"][0][0]


def test_a_clip_of_qwen2_5_steps_in_time_by_its_seconds(opened: Open) -> None:
    four = [noise(64, 48, seed) for seed in range(4)]
    processor = opened("qwen2_5_vl")

    # 2 positions a second, and 2 frames a layer: at 2 frames a second a layer is a second.
    assert processor.read(frames(*four, fps=2.0)).grids[0].step == pytest.approx(2.0)
    assert processor.read(frames(*four, fps=1.0)).grids[0].step == pytest.approx(4.0)
    assert opened("qwen2_vl").read(frames(*four, fps=1.0)).grids[0].step == 1.0


def test_the_same_frames_at_another_rate_are_another_clip_where_that_moves_positions(opened: Open) -> None:
    four = [noise(64, 48, seed) for seed in range(4)]

    def key(family: str, fps: float) -> bytes:
        return opened(family).read(frames(*four, fps=fps)).media[0].key

    assert key("qwen2_5_vl", 2.0) != key("qwen2_5_vl", 1.0)
    assert key("qwen2_5_vl", 2.0) == key("qwen2_5_vl", 2.0)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma4"])
def test_a_clip_and_its_reverse_are_told_apart_by_order_alone(opened: Open, family: str) -> None:
    pictures = [halves(64, 48), Image.new("RGB", (64, 48), RED), Image.new("RGB", (64, 48), BLUE), noise(64, 48)]
    processor = opened(family)
    forth, back = processor.read(frames(*pictures)), processor.read(frames(*reversed(pictures)))

    def pixels(clip: PreparedMedia) -> list[Any]:
        return [medium.load()["pixel_values_videos"] for medium in clip.media]

    assert forth.text == back.text
    assert not all(np.array_equal(one, other) for one, other in zip(pixels(forth), pixels(back), strict=True))
    if family == "gemma4":
        assert all(np.array_equal(one, other) for one, other in zip(pixels(forth), reversed(pixels(back)), strict=True))


def test_a_model_without_clips_gets_frames_as_images_sixteen_at_most(opened: Open) -> None:
    processor = opened("smolvlm")
    shown = processor.read_frames(frames(*(noise(64, 48, seed) for seed in range(20))))

    assert len(shown) == 16
    assert {prepared.kind for prepared in shown} == {"image"}
    assert len({prepared.media[0].key for prepared in shown}) == 16
    assert rows("smolvlm", shown[-1].media[0].load()) == shown[-1].tokens


@pytest.mark.parametrize(
    ("clip", "said"),
    [
        (frames(noise(64, 48), noise(48, 64)), "another size"),
        (media(b"\0\0\0\x09abc", "video", frames=1), "list of frames is broken"),
        (media(struct.pack(">I", 3) + b"abc", "video", frames=1), "Frame 0"),
        (frames(noise(64, 48), num_frames=0), "positive"),
        (frames(noise(64, 48), fps=-1), "positive"),
    ],
)
def test_broken_clips_are_refused(opened: Open, clip: Media, said: str) -> None:
    with pytest.raises(RequestInvalid) as caught:
        opened("qwen3_vl").read(clip)

    assert said in caught.value.failure.message


@pytest.mark.parametrize(
    ("family", "seconds", "tokens"),
    # Gemma 4: frames of 10 ms, halved twice; unified: 40 ms each; Gemma 3n: a fixed number, and the marker behind them.
    [("gemma4", 1.0, 25), ("gemma4", 0.31, 8), ("gemma4_unified", 1.01, 26), ("gemma3n", 1.0, 7)],
)
def test_audio_has_the_tokens_of_its_length(opened: Open, family: str, seconds: float, tokens: int) -> None:
    clip = opened(family).read(media(wav(tone(16_000, seconds), 16_000), "audio"))
    inputs = clip.media[0].load()

    assert clip.tokens == clip.media[0].tokens == tokens
    assert inputs["input_features"].dtype == np.float32
    assert inputs["input_features_mask"].any()
    with pytest.raises(RequestInvalid) as caught:
        opened(family).read(media(wav(tone(1_000, 31.0), 1_000), "audio"))
    assert caught.value.failure.code is Code.INVALID_AUDIO


def test_a_clip_without_a_whole_frame_is_refused(opened: Open) -> None:
    with pytest.raises(RequestInvalid) as caught:
        opened("gemma4").read(media(wav(tone(16_000, 0.005), 16_000), "audio"))

    assert caught.value.failure.code is Code.INVALID_AUDIO
    assert "too short: it lasts 5 ms" in caught.value.failure.message


def test_placeholders_stand_as_often_as_their_runs_are_long() -> None:
    assert expanded([1, 9, 2, 8], (8, 9), (9, 8), (2, 3)) == ([1, 4], [1, 9, 9, 2, 8, 8, 8])
    for other in ((8, 9), (9,)):
        with pytest.raises(ValueError, match="placeholders"):
            expanded([1, 9, 2, 8], (8, 9), other, (2,) * len(other))
