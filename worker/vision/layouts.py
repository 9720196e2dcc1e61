"""Layout of media in a prompt: text and placeholders computed from sizes, and inputs of a tower from pixels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from worker.vision.clips import FrameSampling
from worker.vision.markers import MediaMarkers
from worker.vision.positions import Grid

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
