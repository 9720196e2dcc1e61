"""Inbox messages of a worker's state machine: commands of callers, and events of its own timers and watchers."""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from gateway.supervisor.ports import Process
from gateway.supervisor.waiters import Waiter
from protocol.failures import Failure
from protocol.messages import AdaptersSet, Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.spec import WorkerSpec


class Wish(Enum):
    """Kind of an `Ask`."""

    READY = auto()
    # An operator's: also after failures.
    LOAD = auto()
    RESTART = auto()


@dataclass(frozen=True, slots=True)
class Ask:
    """A caller waits until the model is ready."""

    wish: Wish
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Stop:
    waiter: Waiter
    drain_s: float
    is_closing: bool
    # The failure told to waiting requests, where it is neither of the ordinary ones.
    reason: Failure | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Another specification for the next start; with `is_reload` a running worker is replaced now."""

    spec: WorkerSpec
    load_timeout_s: float
    is_preload: bool
    is_reload: bool


@dataclass(frozen=True, slots=True)
class Adopt:
    process: Process
    epoch: int


class Notice(Enum):
    """Kind of an `About`."""

    # From the memory broker: end it to make room; start it again; its gate is open again.
    EVICT = auto()
    RECYCLE = auto()
    REOPEN = auto()
    # From the link: a send failed; a watched sequence has its first token, or has ended.
    SUSPECT = auto()
    PROGRESS = auto()


@dataclass(frozen=True, slots=True)
class About:
    """A notice about one incarnation; ignored once another has taken its place."""

    notice: Notice
    epoch: int


@dataclass(frozen=True, slots=True)
class Admitted:
    epoch: int
    share_bytes: int


@dataclass(frozen=True, slots=True)
class Denied:
    epoch: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Exited:
    epoch: int
    status: int | None


@dataclass(frozen=True, slots=True)
class Alarm:
    token: int


@dataclass(frozen=True, slots=True)
class Beat:
    pass


Message = Hello | Loading | Ready | Pong | Drained | Goodbye | AdaptersSet
Mail = Ask | Stop | Change | Adopt | About | Admitted | Denied | Exited | Alarm | Beat | Message


class Inbox:
    """Queue of one worker's state machine. Once closed, no one takes from it any more."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Mail] = asyncio.Queue()
        self.is_closed = False

    def put(self, mail: Mail) -> None:
        self._queue.put_nowait(mail)

    async def get(self) -> Mail:
        return await self._queue.get()

    def close(self) -> list[Mail]:
        """Returns what was not handled."""
        self.is_closed = True
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]
