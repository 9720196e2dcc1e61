"""Inbox messages of a worker's state machine: commands of callers, and events of its own timers and watchers."""

import asyncio
from dataclasses import dataclass
from enum import Enum, auto

from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.waiters import Waiter
from protocol.failures import Failure
from protocol.messages import AdaptersSet, Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.spec import WorkerSpec


class CommandKind(Enum):
    """Kind of a `WorkerCommand`."""

    READY = auto()
    # An operator asks for another try, also after failures.
    LOAD = auto()
    RESTART = auto()


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """A caller waits until the model is ready."""

    kind: CommandKind
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class StopWorker:
    waiter: Waiter
    drain_s: float
    is_closing: bool
    # The failure of the requests that wait; None: the model was unloaded, or the server ends.
    reason: Failure | None = None


@dataclass(frozen=True, slots=True)
class ChangeSpec:
    """Another specification for the next start; with `is_reload` a running worker is replaced now."""

    spec: WorkerSpec
    load_timeout_s: float
    is_preload: bool
    is_reload: bool


@dataclass(frozen=True, slots=True)
class AdoptProcess:
    process: WorkerPort
    epoch: int


class EventKind(Enum):
    """Kind of a `WorkerEvent`."""

    # The memory broker ends the worker to make room, replaces it, or opens its gate again.
    EVICT = auto()
    RECYCLE = auto()
    REOPEN = auto()
    # The link failed to send, or a watched sequence has its first token or has ended.
    SUSPECT = auto()
    PROGRESS = auto()
    # The Welcome was sent: requests will reach the worker from now on.
    GREETED = auto()


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """An event of one incarnation, which is ignored once another has taken its place."""

    kind: EventKind
    epoch: int


@dataclass(frozen=True, slots=True)
class MemoryGranted:
    epoch: int
    share_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryDenied:
    epoch: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class ProcessExited:
    epoch: int
    status: int | None


@dataclass(frozen=True, slots=True)
class AlarmDue:
    token: int


@dataclass(frozen=True, slots=True)
class HeartbeatDue:
    pass


Message = Hello | Loading | Ready | Pong | Drained | Goodbye | AdaptersSet
InboxMessage = (
    WorkerCommand
    | StopWorker
    | ChangeSpec
    | AdoptProcess
    | WorkerEvent
    | MemoryGranted
    | MemoryDenied
    | ProcessExited
    | AlarmDue
    | HeartbeatDue
    | Message
)


class WorkerInbox:
    """Queue of one worker's state machine. Once closed, no one takes from it any more."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[InboxMessage] = asyncio.Queue()
        self.is_closed = False

    def put(self, message: InboxMessage) -> None:
        self._queue.put_nowait(message)

    async def get(self) -> InboxMessage:
        return await self._queue.get()

    def close(self) -> list[InboxMessage]:
        """Returns what was not handled."""
        self.is_closed = True
        return [self._queue.get_nowait() for _ in range(self._queue.qsize())]
