"""Size of the suite and patience of its deadlines: what `make test` does in small, and how slow this machine is now.

`MLXD_TEST_FULL=1` (`make soak` sets it) runs every storm, sample and property in full.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

FULL: Final = os.environ.get("MLXD_TEST_FULL", "") not in ("", "0")
AGAIN_S: Final = 60.0
# What a round of `_work` and `_start` take on a core of a quiet machine of 2020 or later.
_ROUND_S: Final = 6e-8
_START_S: Final = 0.015
_ROUNDS_FIRST: Final = 1_000_000
_ROUNDS_AGAIN: Final = 100_000
# Beyond it a machine is not slow but stuck.
_MOST: Final = 20.0
_NAME: Final = "MLXD_TEST_PATIENCE"
_CORES: Final = os.cpu_count() or 1
# Processes of xdist to a core.
_BESIDE: Final = max(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) / _CORES, 1.0)
T = TypeVar("T")


@dataclass(slots=True)
class Patience:
    """Factor of deadlines, which grows with the load and is never below that of the start.

    It falls by `relax` alone: a part that was started with a limit and the deadline of the wait for it have one factor.
    """

    first: float
    measure: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
    factor: float = field(init=False)
    _newest: float = field(init=False)
    _measured_at: float = field(init=False)

    def __post_init__(self) -> None:
        self.factor = self._newest = self.first
        self._measured_at = self.clock()

    def now(self) -> float:
        """The factor, after a new measurement where the last one is older than a minute."""
        now = self.clock()
        if now - self._measured_at >= AGAIN_S:
            # Before the measurement: other threads need not measure too.
            self._measured_at = now
            self._newest = max(self.measure(), self.first)
            self.factor = max(self.factor, self._newest)
        return self.factor

    def relax(self) -> None:
        """Fall to the newest measurement."""
        self.factor = self._newest


def scaled(full: T, small: T) -> T:
    """`full` in a full run, `small` in `make test`."""
    return full if FULL else small


def patience() -> float:
    """Slowness of this machine beside a quiet one, with the processes that share it; never below 1."""
    return min(PATIENCE.now(), _MOST)


def patient(seconds: float) -> float:
    """A deadline, or a limit that the machine's slowness must not reach, on this machine at this time."""
    return seconds * patience()


def _timed(work: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    work()
    return clock() - began


def _work(rounds: int) -> None:
    sum(at * at % 7 for at in range(rounds))


def _start() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)


def _slowness(rounds: int) -> float:
    """Slowness of this moment, or of the core under the load of the last minute, whichever is more.

    A time on the clock includes the load, a time on the core does not.
    """
    load = max(os.getloadavg()[0] / _CORES, 1.0)
    now = _timed(lambda: _work(rounds)) / (rounds * _ROUND_S)
    core = _timed(lambda: _work(rounds), time.thread_time) / (rounds * _ROUND_S)
    return max(now, core * load)


def _bounded(slowness: float) -> float:
    return round(min(max(slowness, 1.0), _MOST), 1)


def _first() -> float:
    """Factor at the start of a run, inherited by its other processes (xdist's, daemons): they all agree."""
    if _NAME not in os.environ:
        slowness = max(_slowness(_ROUNDS_FIRST), _timed(_start) / _START_S)
        os.environ[_NAME] = str(_bounded(slowness))
    return float(os.environ[_NAME])


# The first measurement is made before the processes of xdist run, so their load is added; a later one includes it.
PATIENCE: Final = Patience(_first() * _BESIDE, measure=lambda: _bounded(_slowness(_ROUNDS_AGAIN)))
