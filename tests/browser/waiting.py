"""Waiting for what a browser or a daemon does, by polling with a deadline."""

import time
from collections.abc import Callable

from tests.support.scale import patient

DEADLINE_S, DEADLINE_MOST_S = 15, 60


def deadline_s() -> float:
    """Seconds for one thing to happen; beyond a minute a page is not slow but stuck."""
    return min(DEADLINE_MOST_S, patient(DEADLINE_S))


def seen_s(quiet_s: float) -> float:
    """Seconds that a state lasts which a page must show: longer on a slow machine, by as much as the deadline."""
    return quiet_s * deadline_s() / DEADLINE_S


def until(condition: Callable[[], bool]) -> None:
    """Poll, with a deadline."""
    end = time.monotonic() + deadline_s()
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
