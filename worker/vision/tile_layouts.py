"""Layouts of images as tiles or rows: Idefics 3 and SmolVLM, LLaVA, Pixtral and Mistral 3, LFM2-VL."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from worker.vision.layouts import Bounds, Expansion, Inputs, MediaLayout, MediaPiece, arrays, side
from worker.vision.markers import MediaMarkers


class Idefics3(MediaLayout):
    """Layout of Idefics 3 and SmolVLM: tiles of an image, each after its row and column, then the whole image."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        self._tokens = int(processor.image_seq_len)
        self._fake: str = processor.fake_image_token
        self._whole: str = getattr(processor, "global_image_tag", "") or processor.global_image_token
        self.markers = MediaMarkers({"image": self.token}, (self._fake, self._whole))

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        rows, columns = self._tiles(width, height)
        last = f"{self._fake}{self._whole}{self.token}{self._fake}"
        lines = [
            "".join(f"{self._fake}<row_{row + 1}_col_{column + 1}>{self.token}" for column in range(columns)) + "\n"
            for row in range(rows)
        ]
        text = "".join(lines) + "\n" + last if lines else last
        runs = (self._tokens,) * (rows * columns + 1)
        return Expansion(text, runs, (MediaPiece(sum(runs)),))

    def image_inputs(self, image: Image.Image, _bounds: Bounds) -> Inputs:
        return arrays(self.images([[image]], return_row_col_info=False))

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Return the number of rows and columns of tiles; (0, 0) for an image that is not cut."""
        images = self.images
        if not images.do_image_splitting:
            return 0, 0
        from transformers.models.idefics3.image_processing_pil_idefics3 import get_resize_output_image_size

        if images.do_resize:
            blank = np.broadcast_to(np.uint8(0), (3, height, width))
            height, width = get_resize_output_image_size(blank, images.size["longest_edge"])
        tile = int(images.max_image_size["longest_edge"])
        aspect = width / height
        if width >= height:
            columns = math.ceil(width / tile)
            rows = math.ceil(int(columns * tile / aspect) / tile)
        else:
            rows = math.ceil(height / tile)
            columns = math.ceil(int(rows * tile * aspect) / tile)
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)


class Llava(MediaLayout):
    """Layout of LLaVA with a tower of a fixed size."""

    is_scaled = False

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        high, wide = self.image_inputs(Image.new("RGB", (64, 48)), (None, None))["pixel_values"].shape[-2:]
        self.patch = int(processor.patch_size)
        tokens = (high // self.patch) * (wide // self.patch) + int(processor.num_additional_image_tokens)
        self._tokens = tokens - (processor.vision_feature_select_strategy == "default")

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        return Expansion(self.token, (self._tokens,), (MediaPiece(self._tokens),))


class Pixtral(MediaLayout):
    """Layout of Pixtral and Mistral 3: rows of patches at the image's own size, with a break token after each row."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        from mlx_vlm.models.pixtral.image_processing_pixtral import (
            _size_to_pair,  # pyright: ignore[reportPrivateUsage]  # as the processor itself reads its size
        )

        super().__init__(processor, config)
        self._most = _size_to_pair(self.images.size)
        self.patch = side(processor.patch_size)
        self._side = self.patch * int(processor.spatial_merge_size)
        self._break, self._end = processor.image_break_token, processor.image_end_token
        self.markers = MediaMarkers({"image": self.token}, (self._break, self._end))

    @property
    def max_pixels(self) -> int:
        return self._most[0] * self._most[1]

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        from mlx_vlm.models.pixtral.image_processing_pixtral import get_resize_output_image_size

        high, wide = get_resize_output_image_size((height, width), self._most, self._side)
        rows, columns = high // self._side, wide // self._side
        runs = (columns,) * rows
        text = self._break.join([self.token] * rows) + self._end
        return Expansion(text, runs, (MediaPiece(sum(runs)),))

    def image_inputs(self, image: Image.Image, _bounds: Bounds) -> Inputs:
        return arrays(self.images([[image]], patch_size=self._side))


class Lfm2Vl(MediaLayout):
    """Layout of LFM2-VL: patches of an image, or tiles of a large one and then the whole image."""

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        self._start, self._end = processor.image_start_token, processor.image_end_token
        self._thumbnail = getattr(processor, "image_thumbnail_token", "<|img_thumbnail|>")
        self.patch = int(self.images.encoder_patch_size)
        self.markers = MediaMarkers({"image": self.token}, (self._start, self._end, self._thumbnail))

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        images = self.images
        views, rows, columns, _ = images._views_for_image(
            _Sketch((width, height)),
            images.do_image_splitting,
            images.min_tiles,
            images.max_tiles,
            images.use_thumbnail,
        )
        runs = tuple(self._tokens(*view.size) for view in views)
        if rows * columns == 1:
            return Expansion(f"{self._start}{self.token}{self._end}", runs, (MediaPiece(sum(runs)),))
        tiles = [
            f"<|img_row_{row + 1}_col_{column + 1}|>{self.token}" for row in range(rows) for column in range(columns)
        ]
        tail = [f"{self._thumbnail}{self.token}"] if len(views) > len(tiles) else []
        text = "".join([self._start, *tiles, *tail, self._end])
        return Expansion(text, runs, (MediaPiece(sum(runs)),))

    def image_inputs(self, image: Image.Image, _bounds: Bounds) -> Inputs:
        return arrays(self.images([image], return_tensors="np"), "image_rows", "image_cols", "image_sizes")

    def _tokens(self, width: int, height: int) -> int:
        factor = int(self.images.downsample_factor)
        return math.ceil(width // self.patch / factor) * math.ceil(height // self.patch / factor)


@dataclass(slots=True, frozen=True)
class _Sketch:
    """Object with only an image's size, for a processor that computes where it would cut the image."""

    size: tuple[int, int]

    def resize(self, size: tuple[int, int], _resample: Any = None) -> "_Sketch":
        return _Sketch(size)

    def crop(self, box: tuple[int, int, int, int]) -> "_Sketch":
        return _Sketch((box[2] - box[0], box[3] - box[1]))
