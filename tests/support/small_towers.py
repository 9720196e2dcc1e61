"""Tower of Gemma 3n for images in small: mlx-vlm knows no other sizes of it than 300 million parameters."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Final

import pytest
from mlx_vlm.models.gemma3n import vision
from mlx_vlm.models.gemma3n.vision import MobileNetV5MultiScaleFusionAdapter as Adapter

WIDTH: Final = 32


def _blocks() -> list[list[object]]:
    edge, attention = vision.EdgeResidualConfig, vision.MultiQueryAttentionBlockConfig
    return [
        [edge(3, 16, 2, 0.125)],
        [edge(3, 16, 2, 1.0)],
        [edge(3, 16, 2, 1.0)],
        [edge(3, 32, 2, 1.0), attention(2, 8, 1)],
    ]


def _adapter(in_chs: Sequence[int], out_chs: int, output_resolution: tuple[int, int]) -> Adapter:
    return Adapter([16 + 32], WIDTH, output_resolution)


@contextmanager
def small_towers() -> Generator[None]:
    """Models that are made or loaded inside have it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vision, "gemma3n_mobilenet_def", _blocks)
        patch.setattr(vision, "MobileNetV5MultiScaleFusionAdapter", _adapter)
        yield
