"""Inbox of the engine: messages from other threads to its own."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Final

from protocol.failures import Failure
from protocol.from_worker import AdaptersSet
from protocol.to_worker import Abort, Drain, SetMemory, SetPace, Shutdown
from worker.engine.row import Row
from worker.model.lora.adapter_files import Files

# The engine blocks at most this long for commands while all of its rows wait for something.
WAIT_S: Final = 0.05
# A client that works in a loop sends its next request within this time after its answer.
RETURN_S: Final = 0.1
# Gathering ends after QUIET_S without a request, and after GATHER_S in total.
QUIET_S: Final = 0.01
GATHER_S: Final = 0.025
# Requests of new clients belong to one burst if each follows the previous one within this time.
BURST_S: Final = 0.001
_MAX_ANSWERED: Final = 1024


class WakeUp(Enum):
    """Wake-up: another thread has finished work that a row may wait for."""

    UP = auto()


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Command to set the adapters, given by name and folder. `read` maps each new adapter to its files, or to its
    failure.
    """

    call_id: int
    wanted: tuple[tuple[str, str], ...]
    read: Mapping[tuple[str, str], Files | Failure]
    reply: Callable[[AdaptersSet], None]


Command = Row | Abort | Drain | Shutdown | SetMemory | SetPace | AdapterOrder | WakeUp


class EngineInbox:
    """Queue of commands from any thread to the engine thread, which alone calls `take` and `note_answer`."""

    def __init__(self, *, gather_s: float = GATHER_S, quiet_s: float = QUIET_S, burst_s: float = BURST_S) -> None:
        self._gather_s = gather_s
        self._quiet_s = quiet_s
        self._burst_s = burst_s
        self._queue: SimpleQueue[Command] = SimpleQueue()
        # Times at which rows ended since the engine was last idle.
        self._answered: deque[float] = deque(maxlen=_MAX_ANSWERED)

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def note_answer(self, now: float) -> None:
        """Record that a client got its answer, and may send its next request soon."""
        self._answered.append(now)

    def receive(
        self, idle_s: float | None = None, *, is_idle: bool, is_waiting: bool, rest_s: float = 0.0
    ) -> list[Command]:
        """Return all waiting commands. If the engine is idle, block until there is a command, but at most for `idle_s`
        seconds unless that is None. If all rows wait for other work, or the engine rests, block only for a limited
        time.
        """
        commands: list[Command] = []
        if is_idle:
            with suppress(Empty):
                commands.append(self._queue.get(timeout=idle_s))
                self._gather(commands)
        elif is_waiting or rest_s:
            with suppress(Empty):
                commands.append(self._queue.get(timeout=max(rest_s, WAIT_S if is_waiting else 0.0)))
        with suppress(Empty):
            while True:
                commands.append(self._queue.get_nowait())
        return commands

    def _gather(self, commands: list[Command]) -> None:
        """Wait a moment for more requests: several prompts prefill as one batch at little more than the cost of one.

        Clients that work in loops and were answered together send their next requests together. Requests of other
        clients come in bursts.
        """
        begin = time.monotonic()
        missing = sum(begin - at <= RETURN_S for at in self._answered)
        self._answered.clear()
        is_burst = missing == 0 and isinstance(commands[0], Row)
        quiet_s = self._burst_s if is_burst else self._quiet_s
        while True:
            missing -= isinstance(commands[-1], Row)
            left_s = begin + self._gather_s - time.monotonic()
            if left_s <= 0 or (missing <= 0 and not is_burst):
                return
            try:
                commands.append(self._queue.get(timeout=min(quiet_s, left_s)))
            except Empty:
                return
