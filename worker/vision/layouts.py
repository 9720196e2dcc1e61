"""Layout of media in a prompt: text and placeholders computed from sizes, and inputs of a tower from pixels.

Layouts of Gemma 3, 3n and 4: images, frames of clips and audio between markers.

Layouts of Qwen2-VL and its successors: grids of patches at an image's own size, and clips of many grids.

Layouts of images as tiles or rows: Idefics 3 and SmolVLM, LLaVA, Pixtral and Mistral 3, LFM2-VL.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from worker.vision.clips import FrameSampling
from worker.vision.media import Grid, MediaMarkers

Inputs = dict[str, npt.NDArray[Any]]
# Minimum and maximum pixels of an image that a request sets; None means the model's default.
Bounds = tuple[int | None, int | None]


@dataclass(slots=True, frozen=True)
class MediaPiece:
    """Part of a medium that is encoded separately: the number of its placeholders, and the frames of a clip that it
    shows.
    """

    tokens: int
    frames: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class Expansion:
    """Text of a medium in a prompt.

    In `text`, one placeholder stands for each run of consecutive placeholder tokens; `runs` are the runs' lengths.
    `pieces` are the parts that are encoded separately. `grids` give the positions in space, one per run, for models
    that have such positions. `closing` is the number of tokens after each run that belong to the run's medium: the
    tower embeds them, too.
    """

    text: str
    runs: tuple[int, ...]
    pieces: tuple[MediaPiece, ...]
    grids: tuple[Grid, ...] = ()
    closing: int = 0


class MediaLayout:
    """Layout of one family of processors; each family is a subclass.

    Some families resize an image to `bounds` themselves. Other families keep an image's size, so the image is scaled
    before its layout.
    """

    # How frames are sampled from a clip. None for families that take no clips; frames of a clip are then sent as
    # images.
    sampling: FrameSampling | None = None
    # Maximum pixels of an image whose attention fits in memory; 0 means no limit.
    most_pixels = 0
    # Samples per second of the audio that the tower takes; 0 if the family takes no audio.
    audio_rate = 0
    # Maximum seconds of audio.
    audio_s = 0.0
    # Whether an image is scaled to `bounds` before its layout.
    is_scaled = True

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        self.images: Any = processor.image_processor
        self.patch = int(_value(config.get("vision_config") or {}, "patch_size") or 1)
        self.token: str = processor.image_token
        self.markers = MediaMarkers({"image": self.token})

    @property
    def max_pixels(self) -> int:
        """Return the number of pixels to which larger images are reduced, for towers that attend to the whole image; 0
        for others.
        """
        return 0

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        raise NotImplementedError

    def image_inputs(self, image: Image.Image, _bounds: Bounds) -> Inputs:
        return arrays(self.images([image]))

    def clip(self, _width: int, _height: int, _seconds: Sequence[float], _rate: float) -> Expansion:
        """Lay out the frames of a clip, given the frames' times in seconds and the rate at which they were sampled."""
        raise NotImplementedError

    def clip_inputs(self, frames: list[Image.Image], _count: int) -> Inputs:
        """Return the inputs of one piece of a clip that has `_count` frames in total."""
        raise NotImplementedError

    def audio(self, _samples: int) -> Expansion:
        raise NotImplementedError

    def audio_inputs(self, _samples: npt.NDArray[np.float32]) -> Inputs:
        raise NotImplementedError


def arrays(outputs: Mapping[str, Any], *dropped: str) -> Inputs:
    """Convert a processor's outputs to arrays, except those in `dropped`, which the tower does not take."""
    return {name: np.asarray(value) for name, value in outputs.items() if name not in dropped and value is not None}


def _value(section: Mapping[str, Any], key: str) -> int | None:
    value = section.get(key)
    return side(value) if value is not None else None


def side(size: Any) -> int:
    """Return the side of a patch, which some configurations give as height and width."""
    match size:
        case {"height": int(height)}:
            return height
        case [int(height), *_]:
            return height
        case _:
            return int(size)


class Gemma3(MediaLayout):
    """Layout of Gemma 3: a fixed number of placeholders between two markers for an image and for each of its crops."""

    is_scaled = False

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        self._tokens = int(processor.image_seq_length)
        begin: str = processor.boi_token
        self._one = f"{begin}{self.token}{processor.tokenizer.eoi_token}"
        self.markers = MediaMarkers({"image": begin}, (self.token, processor.tokenizer.eoi_token))

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        image = f"\n\n{self._one}\n\n"
        crops = self._crops(width, height)
        text = image
        if crops:
            text = f"Here is the original image {image} and here are some crops to help you see better "
            text += " ".join([image] * crops)
        runs = (self._tokens,) * (1 + crops)
        return Expansion(text, runs, (MediaPiece(sum(runs)),))

    def image_inputs(self, image: Image.Image, _bounds: Bounds) -> Inputs:
        return arrays(self.images([image]), "num_crops")

    def _crops(self, width: int, height: int) -> int:
        images = self.images
        if not images.do_pan_and_scan:
            return 0
        # The array takes no memory for its pixels: only its shape is used.
        blank = np.broadcast_to(np.uint8(0), (3, height, width))
        ways = ("min_crop_size", "max_num_crops", "min_ratio_to_activate")
        return len(
            images.pan_and_scan(
                blank, **{f"pan_and_scan_{way}": getattr(images, f"pan_and_scan_{way}") for way in ways}
            )
        )


class Gemma3n(MediaLayout):
    """Layout of Gemma 3n: a fixed number of placeholders for an image, and for an audio clip of up to 30 seconds.

    The marker after the placeholders is a token of the tower's own vocabulary, and the tower embeds it.
    """

    is_scaled = False
    _AUDIO_S: Final = 30.0

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        tokenizer = processor.tokenizer
        self._tokens = int(processor.image_seq_length)
        self._text = f"\n\n{processor.boi_token}{self.token}{tokenizer.eoi_token}\n\n"
        self.markers = MediaMarkers({"image": self.token}, (processor.boi_token, tokenizer.eoi_token))
        self._sounds: Any = processor.feature_extractor
        if self._sounds is not None:
            self._audio_tokens = int(processor.audio_seq_length)
            self._audio_text = f"\n\n{processor.boa_token}{processor.audio_token}{tokenizer.eoa_token}\n\n"
            self.audio_rate, self.audio_s = int(self._sounds.sampling_rate), self._AUDIO_S
            others = (*self.markers.others, processor.boa_token, tokenizer.eoa_token)
            self.markers = MediaMarkers({"image": self.token, "audio": processor.audio_token}, others)

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        return Expansion(self._text, (self._tokens,), (MediaPiece(self._tokens + 1),), closing=1)

    def audio(self, _samples: int) -> Expansion:
        return Expansion(self._audio_text, (self._audio_tokens,), (MediaPiece(self._audio_tokens + 1),), closing=1)

    def audio_inputs(self, samples: npt.NDArray[np.float32]) -> Inputs:
        return arrays(self._sounds([samples], sampling_rate=self.audio_rate, return_attention_mask=True))


class Gemma4(MediaLayout):
    """Layout of Gemma 4: the number of placeholders depends on the shape of an image or frame, and on the length of
    audio.
    """

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        super().__init__(processor, config)
        self._begin, self._end = processor.boi_token, processor.eoi_token
        self._videos: Any = processor.video_processor
        self._clip_token: str = processor.video_token
        kinds, others = {"image": self.token, "video": self._clip_token}, (self._begin, self._end)
        self.sampling = FrameSampling(most=int(self._videos.num_frames), least=1, factor=1)
        self._sounds: Any = processor.feature_extractor if config.get("audio_config") else None
        if self._sounds is not None and processor.audio_token:
            self._most_audio = int(processor.audio_seq_length)
            self._around_audio = (processor.boa_token, processor.audio_token, processor.eoa_token)
            self.audio_rate = int(self._sounds.sampling_rate)
            self.audio_s = self._most_audio * processor.audio_ms_per_token / 1e3
            kinds, others = (
                {**kinds, "audio": processor.audio_token},
                (*others, processor.boa_token, processor.eoa_token),
            )
        self.markers = MediaMarkers(kinds, others)

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        tokens = self._tokens(self.images, width, height)
        return Expansion(f"{self._begin}{self.token}{self._end}", (tokens,), (MediaPiece(tokens),))

    def image_inputs(self, image: Image.Image, _bounds: Bounds) -> Inputs:
        return arrays(self.images([image])[0], "num_soft_tokens_per_image")

    def clip(self, width: int, height: int, seconds: Sequence[float], rate: float) -> Expansion:
        tokens = self._tokens(self._videos, width, height)
        frame = f"{self._begin}{self._clip_token}{self._end}"
        text = " ".join(f"{int(second // 60):02d}:{int(second % 60):02d} {frame}" for second in seconds)
        pieces = tuple(MediaPiece(tokens, (at,)) for at in range(len(seconds)))
        return Expansion(text, (tokens,) * len(pieces), pieces)

    def clip_inputs(self, frames: list[Image.Image], _count: int) -> Inputs:
        video = np.stack([np.asarray(frame) for frame in frames]).transpose(0, 3, 1, 2)
        inputs = self._videos([video])
        return arrays({name: inputs[name] for name in ("pixel_values_videos", "video_position_ids")})

    def audio(self, samples: int) -> Expansion:
        begin, token, end = self._around_audio
        tokens = min(self._audio_tokens(samples), self._most_audio)
        return Expansion(f"{begin}{token}{end}", (tokens,), (MediaPiece(tokens),))

    def audio_inputs(self, samples: npt.NDArray[np.float32]) -> Inputs:
        return arrays(self._sounds([samples], sampling_rate=self.audio_rate, return_attention_mask=True))

    def _audio_tokens(self, samples: int) -> int:
        """Count tokens like transformers 5.23, after two convolutions of stride 2; mlx-vlm divides milliseconds
        instead.
        """
        sounds = self._sounds
        if hasattr(sounds, "audio_samples_per_token"):
            return math.ceil(samples / sounds.audio_samples_per_token)
        steps = (samples + sounds.frame_length // 2 - sounds.frame_length - 1) // sounds.hop_length + 1
        for _ in range(2):
            steps = (steps - 1) // 2 + 1
        return max(0, steps)

    @staticmethod
    def _tokens(processor: Any, width: int, height: int) -> int:
        from mlx_vlm.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

        patch, pool = processor.patch_size, processor.pooling_kernel_size
        high, wide = get_aspect_ratio_preserving_size(height, width, patch, processor.max_soft_tokens * pool**2, pool)
        return (high // patch) * (wide // patch) // pool**2


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
