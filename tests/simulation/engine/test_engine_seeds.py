"""Worlds of the engine: every seed keeps every promise, and the same seed is the same run."""

import pytest

from tests.simulation.collector import rare_collections
from tests.simulation.engine.replay import failure
from tests.simulation.engine.world import World
from tests.support.scale import scaled

SEEDS = scaled(5000, 100)
PART = scaled(500, 25)


@pytest.mark.parametrize("first", range(0, SEEDS, PART))
def test_every_answer_is_the_answer_alone_and_nothing_is_left_behind(first: int) -> None:
    with rare_collections():
        for seed in range(first, first + PART):
            try:
                World(seed).run()
            except Exception as error:
                raise AssertionError(failure(seed)) from error


@pytest.mark.parametrize("seed", [2, 18])
def test_the_same_seed_has_the_same_trace(seed: int) -> None:
    assert World(seed).run() == World(seed).run()
