"""Seeds of the gateway's simulation. A failure prints the seed and the command that replays it."""

import os

import pytest

from tests.simulation.story import play

# Seeds that every run of the tests plays, in parts that share the processes of pytest.
SEEDS = 2000
PARTS = 20
SOAK_FACTOR = 25
IS_FULL = os.environ.get("MLXD_TEST_FULL") == "1"


@pytest.mark.parametrize("part", range(PARTS))
def test_every_invariant_holds_in_every_seed(part: int) -> None:
    count = SEEDS * (SOAK_FACTOR if IS_FULL else 1) // PARTS
    failed: list[str] = []
    for seed in range(part * count, (part + 1) * count):
        result = play(seed)
        if result.failure is not None:
            failed.append(f"make simulate SEED={seed} N=1  # {type(result.failure).__name__}: {result.failure}")
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("seed", [1, 2, 3, 14, 15])
def test_a_seed_replays_the_same_trace(seed: int) -> None:
    first, second = play(seed), play(seed)
    assert first.trace == second.trace
    assert first.digest == second.digest
    assert first.turns == second.turns


def test_seeds_differ() -> None:
    assert len({play(seed).digest for seed in range(10)}) == 10
