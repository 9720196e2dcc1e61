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
    """Layout of Qwen2-VL and Qwen2.5-VL: one grid for an image at its own size, one grid for all frames of a clip."""

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
        # The frames' size depends on their number, so this processor must not resize the frames of a single piece
        # again.
        self._exact = copy(self._videos)
        self._exact.min_pixels, self._exact.max_pixels = 1, _UNBOUNDED
        self.markers = MediaMarkers({"image": self.token, "video": self._clip_token}, (self._start, self._end))

    @property
    def max_pixels(self) -> int:
        return int(self.images.max_pixels)

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        high, wide = self.images._resolved_size(height, width, **_limits(bounds))
        return self._expansion(self.token, self._layer(high, wide), layers=1, step=1.0)

    def image_inputs(self, image: Image.Image, bounds: Bounds) -> Inputs:
        return arrays(self.images([image], **_limits(bounds)))

    def clip(self, width: int, height: int, seconds: Sequence[float], rate: float) -> Expansion:
        # Groups of 2 frames at a rate of 2 frames per second make one layer per second.
        step = float(self._per_second) * self._group / rate if self._per_second else 1.0
        return self._expansion(self._clip_token, *self._layers(width, height, len(seconds)), step)

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

        # The tower attends to one group of frames at a time, so the limit of pixels by memory grows with the number of
        # frames.
        most = min(self._videos.max_pixels, self.most_pixels * count or _UNBOUNDED)
        return _smart_resize_video(
            count, height, width, self._group, self.patch * self._merge, min(self._videos.min_pixels, most), most
        )

    def _layer(self, high: int, wide: int) -> Grid:
        """Return the grid of features of an image, or of a group of frames, of `high` × `wide` pixels."""
        return Grid(1, high // self.patch // self._merge, wide // self.patch // self._merge)

    def _layers(self, width: int, height: int, count: int) -> tuple[Grid, int]:
        """Return the grid of a group of frames, and the number of groups in a clip of `count` frames."""
        return self._layer(*self._clip_size(width, height, count)), math.ceil(count / self._group)

    def _expansion(self, token: str, layer: Grid, layers: int, step: float) -> Expansion:
        pieces = self._pieces(layer, layers)
        whole = Grid(layers, layer.height, layer.width, step)
        return Expansion(token, (sum(piece.tokens for piece in pieces),), pieces, (whole,))

    def _pieces(self, layer: Grid, layers: int) -> tuple[MediaPiece, ...]:
        group, tokens = self._group, layer.height * layer.width
        return tuple(MediaPiece(tokens, tuple(range(at * group, at * group + group))) for at in range(layers))


class QwenByTime(Qwen):
    """Layout of Qwen3-VL and Qwen3.5: frames of a clip are grouped, and each group follows its time."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        self._whole = f"{self._start}{self._clip_token}{self._end}"
        others = (self._start, self._end, self._clip_token)
        self.markers = MediaMarkers({"image": self.token, "video": self._whole}, others)

    def clip(self, width: int, height: int, seconds: Sequence[float], rate: float) -> Expansion:
        layer, layers = self._layers(width, height, len(seconds))
        pieces = self._pieces(layer, layers)
        padded = [*seconds, *[seconds[-1]] * (-len(seconds) % self._group)]
        times = [(padded[at] + padded[at + self._group - 1]) / 2 for at in range(0, len(padded), self._group)]
        text = "".join(f"<{time:.1f} seconds>{self._whole}" for time in times)
        return Expansion(text, tuple(piece.tokens for piece in pieces), pieces, (layer,) * layers)


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
