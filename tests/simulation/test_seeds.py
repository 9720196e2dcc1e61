"""Seeds of the gateway's simulation. A failure prints the seed and the command that replays it."""

import os
import subprocess
import sys

import pytest

from tests.simulation.story import play
from tests.support.scale import FULL

# Seeds that every run of the tests plays, in parts.
SEEDS = 2000
PARTS = 10
SOAK_FACTOR = 25


@pytest.mark.parametrize("part", range(PARTS))
def test_every_invariant_holds_in_every_seed(part: int) -> None:
    count = SEEDS * (SOAK_FACTOR if FULL else 1) // PARTS
    # The order of sets follows the hash seed, which a process has from its start.
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tests.simulation", str(part * count), str(count)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("seed", [1, 2, 3, 14, 15])
def test_a_seed_replays_the_same_trace(seed: int) -> None:
    first, second = play(seed), play(seed)
    assert first.trace == second.trace
    assert first.digest == second.digest
    assert first.turns == second.turns


def test_seeds_differ() -> None:
    assert len({play(seed).digest for seed in range(10)}) == 10
