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
        """Its exit status as subprocess reports it; None when it was not our child."""
        ...

    def signal(self, signum: int) -> None:
        """Send a signal; nothing happens when it has exited."""
        ...

    def last_lines(self) -> list[str]:
        """The end of its output."""
        ...

    def failure(self) -> Failure | None:
        """The reason why it has exited, where its exit status and last message do not tell all of it."""
        ...

    def close(self) -> None:
        """Release what it holds here, and its state file. It has exited."""
        ...


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of a state machine, as functions of those whose they are; clock and chance are injected by tests."""

    # Returns when the machine has room for this worker: its share in bytes, 0 for no limit. May be cancelled. Raises
    # `ModelUnavailable` when there will never be room.
    admit: Callable[[WorkerSpec], Awaitable[int]]
    # A worker is in another state. In a settled one but `ready` it has no process.
    entered: Callable[[str, State], None]
    # Starts the process. Raises `OSError`.
    spawn: Callable[[WorkerSpec], WorkerPort]
    next_epoch: Callable[[], int]
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
