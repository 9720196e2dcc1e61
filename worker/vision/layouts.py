"""Layout of media in a prompt: text and placeholders by size, and the inputs of a tower by pixels."""

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
# Least and most pixels that a request wants of an image; None leaves it to the model.
Bounds = tuple[int | None, int | None]


@dataclass(slots=True, frozen=True)
class MediaPiece:
    """Part of a medium that is encoded alone: `tokens` placeholders, and the frames of a clip that it shows."""

    tokens: int
    grid: tuple[int, int, int] = (1, 1, 1)
    frames: tuple[int, ...] = ()


@dataclass(slots=True, frozen=True)
class Expansion:
    """Text that a medium has in a prompt, with one placeholder for each run of them, and the lengths of the runs.

    `grids` are those that positions in space follow, one a run, for models that have such positions. `closing` is the
    number of tokens behind each run that belong to its medium: the tower embeds them too.
    """

    text: str
    runs: tuple[int, ...]
    pieces: tuple[MediaPiece, ...]
    grids: tuple[Grid, ...] = ()
    closing: int = 0


class MediaLayout:
    """Layout of one family of processors: each is a subclass.

    `bounds` are heard by families that size an image by its pixels; others that keep an image's shape get it scaled.
    """

    # Families that show a clip as such; others get its frames as images.
    sampling: FrameSampling | None = None
    # Pixels of an image for whose attention there is memory; 0 is no limit.
    most_pixels = 0
    # Samples a second and seconds of audio; 0 is none.
    audio_rate = 0
    audio_s = 0.0
    # Whether an image is scaled for `bounds` before it is laid out.
    is_scaled = True

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        self.images: Any = processor.image_processor
        self.patch = int(_value(config.get("vision_config") or {}, "patch_size") or 1)
        self.token: str = processor.image_token
        self.markers = MediaMarkers({"image": self.token})

    @property
    def max_pixels(self) -> int:
        """Pixels that larger images are reduced to, of families whose towers attend over all of an image; else 0."""
        return 0

    def image(self, width: int, height: int, bounds: Bounds) -> Expansion:
        raise NotImplementedError

    def image_inputs(self, image: Image.Image, _bounds: Bounds) -> Inputs:
        return arrays(self.images([image]))

    def clip(self, _width: int, _height: int, _seconds: Sequence[float], _rate: float) -> Expansion:
        """A clip's frames at these seconds, sampled at this rate."""
        raise NotImplementedError

    def clip_inputs(self, frames: list[Image.Image], _count: int) -> Inputs:
        """Inputs of one piece of a clip of so many frames."""
        raise NotImplementedError

    def audio(self, _samples: int) -> Expansion:
        raise NotImplementedError

    def audio_inputs(self, _samples: npt.NDArray[np.float32]) -> Inputs:
        raise NotImplementedError


def arrays(outputs: Mapping[str, Any], *dropped: str) -> Inputs:
    """Outputs of a processor as arrays, but for those that a tower does not take."""
    return {name: np.asarray(value) for name, value in outputs.items() if name not in dropped and value is not None}


def _value(section: Mapping[str, Any], key: str) -> int | None:
    value = section.get(key)
    return side(value) if value is not None else None


def side(size: Any) -> int:
    """A patch's side, which some configurations give as height and width."""
    match size:
        case {"height": int(height)}:
            return height
        case [int(height), *_]:
            return height
        case _:
            return int(size)
