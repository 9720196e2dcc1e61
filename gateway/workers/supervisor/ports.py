"""Ports of a worker's state machine: its effects on the machine, and the worker's process."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.link.link import WorkerLink
from gateway.workers.supervisor.limits import WorkerLimits
from gateway.workers.supervisor.state import Events, State
from protocol.failures import Failure
from protocol.spec import WorkerSpec


class WorkerPort(Protocol):
    """Worker process that this gateway started or adopted."""

    @property
    def pid(self) -> int: ...
    @property
    def is_adopted(self) -> bool: ...
    async def wait(self) -> int | None:
        """Wait for the exit. Return the status as `subprocess` reports it; None if the process is not a child."""
        ...

    def signal(self, signum: int) -> None:
        """Send a signal, unless the process has exited."""
        ...

    def last_lines(self) -> list[str]:
        """Return the last lines of the process's output."""
        ...

    def failure(self) -> Failure | None:
        """Return a reason for the exit that neither the exit status nor the Goodbye contains, or None."""
        ...

    def close(self) -> None:
        """Release the resources of the exited process, and remove its state file."""
        ...


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of a worker's state machine on the machine, and the link, events and time limits that all workers share.
    Tests inject clock and randomness.
    """

    link: WorkerLink
    events: Events
    limits: WorkerLimits
    # `admit` waits for memory and returns the worker's share in bytes, 0 for no limit. It raises `ModelUnavailable` if
    # the model can never be granted any.
    admit: Callable[[WorkerSpec], Awaitable[int]]
    # `on_state` is called with a worker's name and its new state.
    on_state: Callable[[str, State], None]
    # `spawn` starts the process. It raises `OSError`.
    spawn: Callable[[WorkerSpec], WorkerPort]
    next_epoch: Callable[[], int]
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
    # `stamp` returns a value that changes with the files of a specification's model.
    stamp: Callable[[WorkerSpec], object] = lambda _: None
