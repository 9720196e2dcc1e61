"""Positions of a prompt in time, height and width for models with multimodal rotary embeddings (MRoPE)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, frozen=True)
class Grid:
    """Block of features, `time` × `height` × `width`; `step` is the distance in time between two layers."""

    time: int
    height: int
    width: int
    step: float = 1.0


def positions(length: int, blocks: Sequence[tuple[int, Grid]]) -> npt.NDArray[np.int32]:
    """Return positions `[3, length]`. Text has consecutive numbers on all axes, and each grid has the coordinates of
    its features.

    Text after a grid continues after the grid's largest position, as in transformers 4 and in the models' training.
    Since transformers 5.23 it continues after the larger of height and width, which differs for videos with many
    layers.
    """
    result = np.empty((3, length), dtype=np.int32)
    at = following = 0
    for begin, grid in blocks:
        end = begin + grid.time * grid.height * grid.width
        result[:, at:begin] = np.arange(following, following + begin - at)
        following += begin - at
        # transformers rounds down as well.
        times = (np.arange(grid.time) * grid.step).astype(np.int64)
        places = result[:, begin:end].reshape(3, grid.time, grid.height, grid.width)
        places[0] = following + times[:, None, None]
        places[1] = following + np.arange(grid.height)[:, None]
        places[2] = following + np.arange(grid.width)
        following += max(int(times[-1]), grid.height - 1, grid.width - 1) + 1
        at = end
    result[:, at:] = np.arange(following, following + length - at)
    return result
