"""Ports of a worker's state machine: its effects on the machine, and a process."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.workers.supervisor.state import State
from protocol.failures import Failure
from protocol.spec import WorkerSpec


class WorkerPort(Protocol):
    """A worker process, started by us or adopted."""

    @property
    def pid(self) -> int: ...
    @property
    def is_adopted(self) -> bool: ...
    async def wait(self) -> int | None:
        """Return its exit status as subprocess reports it; None if it is not a child process."""
        ...

    def signal(self, signum: int) -> None:
        """Send a signal, unless it has exited."""
        ...

    def last_lines(self) -> list[str]:
        """Return the end of its output."""
        ...

    def failure(self) -> Failure | None:
        """Return a reason of its exit that its exit status and Goodbye do not contain."""
        ...

    def close(self) -> None:
        """Release the resources of an exited process, and remove its state file."""
        ...


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of a state machine on the machine; tests inject clock and randomness."""

    # Waits for room, and returns the worker's share in bytes, 0 for no limit. Raises `ModelUnavailable` if there can
    # never be room.
    admit: Callable[[WorkerSpec], Awaitable[int]]
    # Called with a worker's name and new state.
    on_state: Callable[[str, State], None]
    # Starts the process. Raises `OSError`.
    spawn: Callable[[WorkerSpec], WorkerPort]
    next_epoch: Callable[[], int]
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
