"""Positions of a prompt in time, height and width for models with multimodal rotary embeddings (MRoPE)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(slots=True, frozen=True)
class Block:
    """Tokens [begin, end) of a prompt that are a grid of `time` × `height` × `width` features.

    `step` is the distance of two layers of the grid in time.
    """

    begin: int
    end: int
    time: int
    height: int
    width: int
    step: float = 1.0


def positions(length: int, blocks: Sequence[Block]) -> npt.NDArray[np.int32]:
    """Positions [3, length]: of text one number a token on each axis, of a block its place in the grid.

    Tokens after a block begin after the largest position in it, as in transformers 4 and in the models' training. From
    transformers 5.23 on they begin after the larger of height and width: other numbers for videos with more layers.
    """
    result = np.empty((3, length), dtype=np.int32)
    at = following = 0
    for block in blocks:
        assert block.time * block.height * block.width == block.end - block.begin, block
        result[:, at : block.begin] = np.arange(following, following + block.begin - at)
        following += block.begin - at
        # As transformers rounds: of a float down.
        times = (np.arange(block.time) * block.step).astype(np.int64)
        grid = result[:, block.begin : block.end].reshape(3, block.time, block.height, block.width)
        grid[0] = following + times[:, None, None]
        grid[1] = following + np.arange(block.height)[:, None]
        grid[2] = following + np.arange(block.width)
        following += max(int(times[-1]), block.height - 1, block.width - 1) + 1
        at = block.end
    result[:, at:] = np.arange(following, following + length - at)
    return result
