"""Keeping a Mac awake while it has something to do: a `caffeinate` that runs as long as there is.

On other systems nothing is held: an operator of mlxd on a machine that sleeps configures that in the system.
"""

import asyncio
import logging
import os
import subprocess
import time
from collections.abc import Callable
from typing import Final, Protocol

from gateway.config.settings import PreventSleep

log = logging.getLogger(__name__)

# A second request soon after the first should find the machine as it was left.
LINGER_S: Final = 30.0
POLL_S: Final = 1.0


class Holder(Protocol):
    """A process that keeps the machine awake while it runs."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...


def caffeinate() -> Holder:
    """`-i`: the display may sleep. `-w`: it ends with us, however we end. Raises `OSError`."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())), stdin=quiet, stdout=quiet, stderr=quiet
    )


class Awake:
    """Holds at most one; `mode` and `is_busy` are asked again each second."""

    def __init__(
        self,
        mode: Callable[[], PreventSleep],
        is_busy: Callable[[], bool],
        *,
        hold: Callable[[], Holder] = caffeinate,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
    ) -> None:
        self._mode = mode
        self._is_busy = is_busy
        self._hold = hold
        self._clock = clock
        self._poll_s = poll_s
        self._holder: Holder | None = None
        self._busy_at: float | None = None
        # Processes that were told to end, until they have: they are reaped here only.
        self._leaving: list[Holder] = []

    @property
    def is_held(self) -> bool:
        return self._holder is not None

    async def run(self) -> None:
        """Until cancelled; or until it turns out that it cannot be done."""
        try:
            while True:
                if not self._tick():
                    return
                await asyncio.sleep(self._poll_s)
        finally:
            self._let_go()

    def _tick(self) -> bool:
        """One look. False when there is no use in another."""
        self._leaving = [holder for holder in self._leaving if holder.poll() is None]
        if self._holder is not None and self._holder.poll() is not None:
            self._holder = None
        if not self._is_wanted():
            self._let_go()
        elif self._holder is None:
            try:
                self._holder = self._hold()
            except OSError as error:
                log.warning("the machine may sleep during requests: no caffeinate (%s)", error.strerror)
                return False
        return True

    def _is_wanted(self) -> bool:
        mode = self._mode()
        if mode == "always":
            return True
        if mode == "busy":
            now = self._clock()
            if self._is_busy():
                self._busy_at = now
            return self._busy_at is not None and now - self._busy_at < LINGER_S
        return False

    def _let_go(self) -> None:
        if self._holder is not None:
            self._holder.terminate()
            self._leaving.append(self._holder)
            self._holder = None
