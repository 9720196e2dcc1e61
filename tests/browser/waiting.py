"""Waiting for what a browser or a daemon does, by polling with a deadline."""

import time
from collections.abc import Callable

from tests.support.scale import patient


def deadline_s() -> float:
    """Seconds for one thing to happen; beyond a minute a page is not slow but stuck."""
    return min(60, patient(15))


def until(condition: Callable[[], bool]) -> None:
    """Poll, with a deadline."""
    end = time.monotonic() + deadline_s()
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)
