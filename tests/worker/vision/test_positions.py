"""Positions in time, height and width: equal to those of transformers, which wrote the arrays below."""

import numpy as np
import pytest

from worker.vision.media import Grid, positions

# transformers 4.57.1, `get_rope_index` of qwen2_vl, qwen2_5_vl and qwen3_vl: rows of time, height and width.
EXPECTED: dict[str, tuple[list[tuple[int, Grid]], str]] = {
    "an image": (
        [(6, Grid(1, 2, 3))],
        """0 1 2 3 4 5 6 6 6 6 6 6 9 10 11 12
           0 1 2 3 4 5 6 6 6 7 7 7 9 10 11 12
           0 1 2 3 4 5 6 7 8 6 7 8 9 10 11 12""",
    ),
    "two images": (
        [(3, Grid(1, 2, 3)), (13, Grid(1, 4, 1))],
        """0 1 2 3 3 3 3 3 3 6 7 8 9 10 10 10 10 14 15
           0 1 2 3 3 3 4 4 4 6 7 8 9 10 11 12 13 14 15
           0 1 2 3 4 5 3 4 5 6 7 8 9 10 10 10 10 14 15""",
    ),
    "a video longer than it is high": (
        [(4, Grid(5, 2, 2))],
        """0 1 2 3 4 4 4 4 5 5 5 5 6 6 6 6 7 7 7 7 8 8 8 8 9 10 11
           0 1 2 3 4 4 5 5 4 4 5 5 4 4 5 5 4 4 5 5 4 4 5 5 9 10 11
           0 1 2 3 4 5 4 5 4 5 4 5 4 5 4 5 4 5 4 5 4 5 4 5 9 10 11""",
    ),
    "an image and a video by its seconds": (
        [(3, Grid(1, 2, 2)), (10, Grid(2, 2, 3, step=4.0))],
        """0 1 2 3 3 3 3 5 6 7 8 8 8 8 8 8 12 12 12 12 12 12 13 14 15
           0 1 2 3 3 4 4 5 6 7 8 8 8 9 9 9 8 8 8 9 9 9 13 14 15
           0 1 2 3 4 3 4 5 6 7 8 9 10 8 9 10 8 9 10 8 9 10 13 14 15""",
    ),
    "an image and a video with text between its frames": (
        [(2, Grid(1, 2, 2)), (10, Grid(1, 2, 2)), (17, Grid(1, 2, 2))],
        """0 1 2 2 2 2 4 5 6 7 8 8 8 8 10 11 12 13 13 13 13 15 16
           0 1 2 2 3 3 4 5 6 7 8 8 9 9 10 11 12 13 13 14 14 15 16
           0 1 2 3 2 3 4 5 6 7 8 9 8 9 10 11 12 13 14 13 14 15 16""",
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_positions_are_those_of_transformers(name: str) -> None:
    blocks, written = EXPECTED[name]
    expected = np.array([line.split() for line in written.splitlines()], dtype=np.int32)

    assert np.array_equal(positions(expected.shape[1], blocks), expected)


def test_text_alone_has_one_number_a_token_on_each_axis() -> None:
    assert np.array_equal(positions(5, []), np.broadcast_to(np.arange(5), (3, 5)))


def test_seconds_that_are_no_whole_number_are_rounded_down_a_layer() -> None:
    # As transformers 5.23 does; 4.57 dropped the fraction of a second first.
    assert positions(3, [(0, Grid(3, 1, 1, step=2.5))])[0].tolist() == [0, 2, 5]
