"""Layouts of Gemma 3, 3n and 4: images, frames of clips and audio between markers."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from worker.vision.clips import FrameSampling
from worker.vision.layouts import Bounds, Expansion, Inputs, MediaLayout, MediaPiece, arrays
from worker.vision.markers import MediaMarkers


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
