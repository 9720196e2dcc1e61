"""Keeps a Mac awake while the daemon is busy, by a `caffeinate` process.

On other systems the operator configures sleep.
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

# Sleep is prevented until this time after the last request.
LINGER_S: Final = 30.0
POLL_S: Final = 1.0


class AwakeProcess(Protocol):
    """Process that keeps the machine awake while it runs."""

    def poll(self) -> int | None: ...
    def terminate(self) -> None: ...


def caffeinate() -> AwakeProcess:
    """Start caffeinate: with `-i` the display may sleep, with `-w` it ends with this process. Raises `OSError`."""
    quiet = subprocess.DEVNULL
    return subprocess.Popen(
        ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid())), stdin=quiet, stdout=quiet, stderr=quiet
    )


class Awake:
    """Runs at most one process that prevents sleep; `mode` and `is_busy` are called each second."""

    def __init__(
        self,
        mode: Callable[[], PreventSleep],
        is_busy: Callable[[], bool],
        *,
        start: Callable[[], AwakeProcess] = caffeinate,
        clock: Callable[[], float] = time.monotonic,
        poll_s: float = POLL_S,
    ) -> None:
        self._mode = mode
        self._is_busy = is_busy
        self._start = start
        self._clock = clock
        self._poll_s = poll_s
        self._process: AwakeProcess | None = None
        self._busy_at: float | None = None
        # Processes that were terminated and not reaped yet.
        self._terminated: list[AwakeProcess] = []

    @property
    def is_held(self) -> bool:
        return self._process is not None

    async def run(self) -> None:
        """Prevent sleep until cancelled; return if this system has no caffeinate."""
        try:
            while self._update():  # noqa: ASYNC110 - processes and the clock are polled
                await asyncio.sleep(self._poll_s)
        finally:
            self._terminate()

    def _update(self) -> bool:
        """Start or end the process. Return False if it cannot be started."""
        self._terminated = [process for process in self._terminated if process.poll() is None]
        if self._process is not None and self._process.poll() is not None:
            self._process = None
        if not self._is_wanted():
            self._terminate()
        elif self._process is None:
            try:
                self._process = self._start()
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

    def _terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._terminated.append(self._process)
            self._process = None
