"""Clips: lists of frames and files, sampled over their length."""

import io
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protocol.failures import Code
from protocol.to_worker import Media
from tests.support.scale import scaled
from worker.errors import RequestInvalid
from worker.vision import clips
from worker.vision.clips import FrameSampling, open_clip
from worker.vision.images import MediaLimits

LIMITS = MediaLimits(bytes=1 << 20, count=4, pixels=64_000_000)


class Plain:
    """A clip of a number of frames."""

    def __init__(self, count: int, rate: float) -> None:
        self.count, self.rate, self.width, self.height = count, rate, 64, 48

    def frames(self, indices: object) -> list[Image.Image]:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("count", "rate", "options", "expected"),
    [
        (90, 30.0, {}, [0, 18, 36, 53, 71, 89]),  # 3 seconds at 2 a second
        (90, 30.0, {"fps": 1}, [0, 30, 59, 89]),  # no fewer than 4
        (90, 30.0, {"num_frames": 3}, [0, 89]),  # a multiple of 2
        (3, 30.0, {}, [0, 2]),
        (1, 30.0, {}, [0]),
        (6, 2.0, {"frames": 6}, [0, 1, 2, 3, 4, 5]),
        (6, 2.0, {"frames": 6, "num_frames": 2}, [0, 5]),
    ],
)
def test_frames_are_spread_over_the_clip(
    count: int, rate: float, options: dict[str, int | float], expected: list[int]
) -> None:
    assert FrameSampling().indices(Plain(count, rate), options) == expected


def test_a_long_clip_has_no_more_frames_than_the_model_takes() -> None:
    indices = FrameSampling(most=16).indices(Plain(100_000, 30.0), {})

    assert (len(indices), indices[0], indices[-1]) == (16, 0, 99_999)


def test_a_file_names_the_extra_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "find_spec", lambda _: None)
    with pytest.raises(RequestInvalid) as caught:
        open_clip(Media("video", b"", b"\0\0\0\x18ftypmp42", {}, "input[0]"), LIMITS)

    assert (caught.value.failure.code, caught.value.failure.param) == (Code.UNSUPPORTED_MODALITY, "input[0]")
    assert "mlxd[media]" in caught.value.failure.message
    assert "JPEG frames" in caught.value.failure.message


def film(count: int, rate: int = 10) -> bytes:
    """A file whose frames get lighter, each by a step."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.gop_size = 12
        for index in range(count):
            gray = np.full((48, 64, 3), 10 + index * 230 // count, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(gray, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)
    return file.getvalue()


def test_frames_of_a_file_are_those_that_were_asked_for_near_and_far() -> None:
    clip = open_clip(Media("video", b"", film(120), {}), LIMITS)
    wanted = [0, 1, 7, 70, 118]
    lightness = [float(np.asarray(frame).mean()) for frame in clip.frames(wanted)]

    assert (clip.count, clip.rate, clip.width, clip.height) == (120, 10.0, 64, 48)
    assert lightness == pytest.approx([10 + index * 230 // 120 for index in wanted], abs=3)


def test_a_file_that_breaks_off_is_refused_and_so_is_one_without_frames() -> None:
    data = film(20)
    for broken in (data[: len(data) // 8], b"\0\0\0\x18ftypmp42", b"hello"):
        with pytest.raises(RequestInvalid) as caught:
            open_clip(Media("video", b"", broken, {}), LIMITS)
        assert caught.value.failure.code is Code.INVALID_VIDEO


def test_crafted_files_are_refused_and_raise_nothing_else() -> None:
    whole = film(6)
    draw = random.Random(1)
    for _ in range(scaled(2000, 80)):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            data[draw.randrange(max(0, len(data) - 1200), len(data))] = draw.randrange(256)
        try:
            clip = open_clip(Media("video", b"", bytes(data), {}), LIMITS)
            frames = clip.frames([0, min(clip.count - 1, 5)])
        except RequestInvalid as error:
            assert error.failure.code in (Code.INVALID_VIDEO, Code.IMAGE_TOO_LARGE)  # noqa: PT017
        else:
            assert {frame.size for frame in frames} == {(clip.width, clip.height)}


def test_a_list_of_other_files_is_refused_and_opens_none(tmp_path: Path) -> None:
    named = tmp_path / "secret.mp4"
    named.write_bytes(film(4))
    lists = [
        f"#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{named.as_uri()}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {named}\n",
    ]
    for text in lists:
        with pytest.raises(RequestInvalid) as caught:
            open_clip(Media("video", b"", text.encode(), {}), LIMITS)
        assert caught.value.failure.code is Code.INVALID_VIDEO


def test_a_file_of_too_many_pixels_is_refused() -> None:
    with pytest.raises(RequestInvalid) as caught:
        open_clip(Media("video", b"", film(2), {}), MediaLimits(bytes=1 << 20, count=4, pixels=1000))

    assert caught.value.failure.code is Code.IMAGE_TOO_LARGE
