"""Size of the suite and patience of its deadlines: what `make test` does in small, and how slow this machine is now.

`MLXD_TEST_FULL=1` (`make soak` and `make fuzz` set it) runs every storm, sample and property in full.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final, TypeVar

FULL: Final = os.environ.get("MLXD_TEST_FULL", "") not in ("", "0")
# What `_work` and `_start` take on a core of a quiet machine of 2020 or later.
_WORK_S: Final = 0.06
_START_S: Final = 0.015
# Beyond it a machine is not slow but stuck.
_MOST: Final = 20.0
_NAME: Final = "MLXD_TEST_PATIENCE"
T = TypeVar("T")


def scaled(full: T, small: T) -> T:
    """`full` in a full run, `small` in `make test`."""
    return full if FULL else small


def patient(seconds: float) -> float:
    """A deadline, or a limit that the machine's slowness must not reach, on this machine at this time."""
    return seconds * PATIENCE


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _work() -> None:
    sum(at * at % 7 for at in range(1_000_000))


def _start() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)


def _patience() -> float:
    """Slowness of this machine beside a quiet one, with the processes that share it; never below 1.

    Measured once: processes of one run (xdist's, daemons) inherit it, so that both ends of a deadline agree.
    """
    cores = os.cpu_count() or 1
    beside = max(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) / cores, 1.0)
    if _NAME not in os.environ:
        slowness = max(_timed(_work) / _WORK_S, _timed(_start) / _START_S, 1.0)
        load = max(os.getloadavg()[0] / cores, 1.0)
        os.environ[_NAME] = str(round(min(slowness * load, _MOST), 1))
    return min(float(os.environ[_NAME]) * beside, _MOST)


PATIENCE: Final = _patience()
