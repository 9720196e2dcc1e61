"""The engine's inbox: messages from the other threads to the engine's thread."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from queue import Empty, SimpleQueue
from typing import Final

from protocol.failures import Failure
from protocol.from_worker import AdaptersSet, Drained
from protocol.to_worker import Abort, Drain, SetMemory, SetPace, Shutdown
from worker.engine.row import Row
from worker.model.lora.adapter_files import Files

# How long an engine whose rows all wait for something looks for commands.
WAIT_S: Final = 0.05
# An answered client that works in a loop is back within this time …
RETURN_S: Final = 0.1
# … and others are waited for while one comes after the other no slower than this, …
QUIET_S: Final = 0.01
# … for no longer than this in all.
GATHER_S: Final = 0.025
# Requests of new clients come in one burst while one follows the other within this time.
BURST_S: Final = 0.001
_MOST_ANSWERED: Final = 1024
_MOST_EARLY_ABORTS: Final = 1 << 16


class WakeUp(Enum):
    """A wake-up: another thread has finished something that a row may be waiting for."""

    UP = auto()


@dataclass(slots=True)
class EngineDrain:
    """The newest order to drain, done or not: rows end within a time, and no new ones are taken until they have.

    Owned by the engine thread; times are of the monotonic clock.
    """

    until: float | None = None
    aborted: int = 0
    # When the newest one ended: what came before, and took its time in the intake, is refused as well.
    ended: float = float("-inf")

    def begin(self, deadline_s: float) -> None:
        self.until = time.monotonic() + deadline_s

    @property
    def is_on(self) -> bool:
        return self.until is not None

    def refuses(self, arrived: float) -> bool:
        """Whether a row that arrived then is not taken."""
        return self.is_on or arrived <= self.ended

    def is_due(self, now: float) -> bool:
        """Whether rows that still run have had their time."""
        return self.until is not None and now >= self.until

    def end(self, epoch: int) -> Drained:
        """The answer, once no row is left."""
        answer = Drained(epoch, self.aborted)
        self.until, self.aborted, self.ended = None, 0, time.monotonic()
        return answer


class EarlyAborts:
    """Aborts that overtook their requests, which a grammar or long prompts may hold in the intake for minutes.

    The newest are kept, far more than requests can be on their way. Owned by the loop's thread.
    """

    def __init__(self) -> None:
        self._rids: dict[int, None] = {}

    def add(self, rid: int) -> None:
        self._rids[rid] = None
        while len(self._rids) > _MOST_EARLY_ABORTS:
            del self._rids[next(iter(self._rids))]

    def take(self, rid: int) -> bool:
        """Whether the request was aborted before it came; that is forgotten."""
        if rid not in self._rids:
            return False
        del self._rids[rid]
        return True

    def __len__(self) -> int:
        return len(self._rids)


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """The adapters to have from now on, by name and folder; of those that are new, what was read of them."""

    call_id: int
    wanted: tuple[tuple[str, str], ...]
    read: Mapping[tuple[str, str], Files | Failure]
    reply: Callable[[AdaptersSet], None]


Command = Row | Abort | Drain | Shutdown | SetMemory | SetPace | AdapterOrder | WakeUp


class EngineInbox:
    """Commands, from any thread to the engine's, which alone calls `take` and `answered`."""

    def __init__(self, *, gather_s: float = GATHER_S, quiet_s: float = QUIET_S, burst_s: float = BURST_S) -> None:
        self._gather_s = gather_s
        self._quiet_s = quiet_s
        self._burst_s = burst_s
        self._queue: SimpleQueue[Command] = SimpleQueue()
        # When rows ended since the engine was last idle.
        self._answered: deque[float] = deque(maxlen=_MOST_ANSWERED)

    def put(self, command: Command) -> None:
        self._queue.put(command)

    def answered(self, now: float) -> None:
        """A client has its answer and may be about to ask again."""
        self._answered.append(now)

    def take(self, *, is_idle: bool, is_waiting: bool, rest_s: float = 0.0) -> list[Command]:
        """All that is there. Blocks for a first command when there is nothing else to do, briefly when rows wait, and
        for as long as the loop rests."""
        commands: list[Command] = []
        if is_idle:
            commands.append(self._queue.get())
            self._gather(commands)
        elif is_waiting or rest_s:
            with suppress(Empty):
                commands.append(self._queue.get(timeout=max(rest_s, WAIT_S if is_waiting else 0.0)))
        with suppress(Empty):
            while True:
                commands.append(self._queue.get_nowait())
        return commands

    def _gather(self, commands: list[Command]) -> None:
        """Wait a moment for the requests that come with the first: their prompts prefill as one batch at little more
        than the cost of one.

        Those that were answered together come back together when their clients work in loops. Others come in bursts.
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
