"""Layouts of Qwen2-VL and its successors: grids of patches at an image's own size, and clips of many grids."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Final

import numpy as np
from PIL import Image

from worker.vision.clips import FrameSampling
from worker.vision.layouts import Bounds, Expansion, Inputs, MediaLayout, MediaPiece, arrays
from worker.vision.markers import MediaMarkers
from worker.vision.positions import Grid

_UNBOUNDED: Final = 1 << 62


class Qwen(MediaLayout):
    """Layout of Qwen2-VL and Qwen2.5-VL: one grid for an image at its own size, one for all frames of a clip."""

    is_scaled = False

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        self._videos: Any = processor.video_processor
        self._merge = int(self.images.merge_size)
        self.patch = int(self.images.patch_size)
        self._start, self._end = _around(processor)
        self._clip_token: str = processor.video_token
        self._per_second = (config.get("vision_config") or {}).get("tokens_per_second")
        self.sampling = _sampling(self._videos)
        # The frame size of a clip depends on the number of frames, so a single piece must not be resized again.
        self._exact = copy(self._videos)
        self._exact.min_pixels, self._exact.max_pixels = 1, _UNBOUNDED
        self.markers = MediaMarkers({"image": self.token, "video": self._clip_token}, (self._start, self._end))

    @property
    def max_pixels(self) -> int:
        return int(self.images.max_pixels)

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        high, wide = self.images._resolved_size(height, width, **_limits(bounds))
        grid = (1, high // self.patch, wide // self.patch)
        return self._expansion(self.token, [grid], step=1.0)

    def image_inputs(self, image: Image.Image, bounds: Bounds) -> Inputs:
        return arrays(self.images([image], **_limits(bounds)))

    def clip(self, width: int, height: int, seconds: Sequence[float], rate: float) -> Expansion:
        # Groups of 2 frames at a rate of 2 frames a second make one layer a second.
        step = float(self._per_second) * self._group / rate if self._per_second else 1.0
        return self._expansion(self._clip_token, self._grids(width, height, len(seconds)), step)

    def clip_inputs(self, frames: list[Image.Image], count: int) -> Inputs:
        high, wide = self._clip_size(frames[0].width, frames[0].height, count)
        video = np.stack([np.asarray(frame.resize((wide, high), Image.Resampling.BICUBIC)) for frame in frames])
        return arrays(self._exact([video.transpose(0, 3, 1, 2)]))

    @property
    def _group(self) -> int:
        return int(self._videos.temporal_patch_size)

    def _clip_size(self, width: int, height: int, count: int) -> tuple[int, int]:
        from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import (
            _smart_resize_video,  # pyright: ignore[reportPrivateUsage]  # as the processor itself sizes a clip
        )

        # The tower attends to one group of frames at a time.
        most = min(self._videos.max_pixels, self.most_pixels * count or _UNBOUNDED)
        return _smart_resize_video(
            count, height, width, self._group, self.patch * self._merge, min(self._videos.min_pixels, most), most
        )

    def _grids(self, width: int, height: int, count: int) -> list[tuple[int, int, int]]:
        high, wide = self._clip_size(width, height, count)
        return [(1, high // self.patch, wide // self.patch)] * math.ceil(count / self._group)

    def _expansion(self, token: str, grids: list[tuple[int, int, int]], step: float) -> Expansion:
        tokens = grids[0][1] * grids[0][2] // self._merge**2
        whole = Grid(len(grids), grids[0][1] // self._merge, grids[0][2] // self._merge, step)
        return Expansion(token, (tokens * len(grids),), self._pieces(grids, tokens), (whole,))

    def _pieces(self, grids: list[tuple[int, int, int]], tokens: int) -> tuple[MediaPiece, ...]:
        group = self._group
        return tuple(
            MediaPiece(tokens, grid, tuple(range(at * group, at * group + group))) for at, grid in enumerate(grids)
        )


class QwenByTime(Qwen):
    """Layout of Qwen3-VL and Qwen3.5: frames of a clip come in groups, each after its time."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        self._whole = f"{self._start}{self._clip_token}{self._end}"
        others = (self._start, self._end, self._clip_token)
        self.markers = MediaMarkers({"image": self.token, "video": self._whole}, others)

    def clip(self, width: int, height: int, seconds: Sequence[float], rate: float) -> Expansion:
        grids = self._grids(width, height, len(seconds))
        tokens = grids[0][1] * grids[0][2] // self._merge**2
        padded = [*seconds, *[seconds[-1]] * (-len(seconds) % self._group)]
        times = [(padded[at] + padded[at + self._group - 1]) / 2 for at in range(0, len(padded), self._group)]
        layer = Grid(1, grids[0][1] // self._merge, grids[0][2] // self._merge)
        return Expansion(
            "".join(f"<{time:.1f} seconds>{self._whole}" for time in times),
            (tokens,) * len(grids),
            self._pieces(grids, tokens),
            (layer,) * len(grids),
        )


def _limits(bounds: Bounds) -> dict[str, int]:
    return {name: value for name, value in zip(("min_pixels", "max_pixels"), bounds, strict=True) if value is not None}


def _around(processor: Any) -> tuple[str, str]:
    """Return the tokens before and after an image; the processors of Qwen2 do not name them."""
    start = getattr(processor, "vision_start_token", "<|vision_start|>")
    return start, getattr(processor, "vision_end_token", "<|vision_end|>")


def _sampling(videos: Any) -> FrameSampling:
    return FrameSampling(
        float(videos.fps), int(videos.min_frames), int(videos.max_frames), int(videos.temporal_patch_size)
    )
