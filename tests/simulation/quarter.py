"""A quarter of the seeds that every run of the tests plays.

`--dist loadfile` gives a file to one process, so each quarter is a file of its own.
"""

import os
import subprocess
import sys

from tests.support.scale import FULL

SEEDS = 2000
SOAK_FACTOR = 50


def play_quarter(number: int) -> None:
    """Play a quarter of the seeds. A failure prints the seed and the command that replays it."""
    count = SEEDS * (SOAK_FACTOR if FULL else 1) // 4
    done = play_seeds(number * count, count)
    assert done.returncode == 0, done.stdout + done.stderr


def play_seeds(first: int, count: int) -> subprocess.CompletedProcess[str]:
    """Play seeds in a process of its own, whose sets have a fixed order. One seed alone prints its trace."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "tests.simulation", str(first), str(count)],
        # The order of sets follows the hash seed, which a process has from its start.
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
