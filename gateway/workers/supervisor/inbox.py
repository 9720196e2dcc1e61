"""Inbox messages of a worker's state machine: commands of callers, and events of its own timers and watchers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from gateway.link.transport import SendFailed, SequenceProgressed
from gateway.workers.supervisor.state import SHUTTING_DOWN, ModelUnavailable, WorkerPort
from protocol.failures import Failure
from protocol.from_worker import AdaptersSet, Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.spec import WorkerSpec

Waiter = asyncio.Future[None]


class CommandKind(Enum):
    """Kind of a `WorkerCommand`."""

    READY = auto()
    # An operator's LOAD, unlike a request, also starts a model that has failed.
    LOAD = auto()
    RESTART = auto()


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """Command whose caller waits until the model is ready."""

    kind: CommandKind
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class StopWorker:
    waiter: Waiter
    drain_s: float
    is_closing: bool
    # Failure for the requests that wait; None for an unload or a shutdown.
    reason: Failure | None = None


@dataclass(frozen=True, slots=True)
class ChangeSpec:
    """New specification for the next start. With `is_reload`, a running worker is replaced now."""

    spec: WorkerSpec
    is_preload: bool
    is_reload: bool


@dataclass(frozen=True, slots=True)
class AdoptProcess:
    process: WorkerPort
    epoch: int


class EventKind(Enum):
    """Kind of a `WorkerEvent`."""

    # The memory broker ends the worker to make room.
    EVICT = auto()
    # The memory broker orders a replacement of the worker.
    RECYCLE = auto()
    # The memory broker opens the worker's gate again.
    REOPEN = auto()
    # The Welcome was sent, so the worker is routable.
    GREETED = auto()


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """Event of one process of the worker."""

    kind: EventKind
    epoch: int


@dataclass(frozen=True, slots=True)
class MemoryGranted:
    epoch: int
    memory_bytes: int


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


# Messages that are about one process, and ignored after the next process has begun. The link drops stale Pongs.
EpochMessage = (
    WorkerEvent
    | MemoryGranted
    | MemoryDenied
    | ProcessExited
    | SendFailed
    | SequenceProgressed
    | Hello
    | Loading
    | Ready
    | Drained
    | Goodbye
    | AdaptersSet
)
InboxMessage = WorkerCommand | StopWorker | ChangeSpec | AdoptProcess | AlarmDue | HeartbeatDue | Pong | EpochMessage


class WorkerInbox:
    """Queue of messages to one worker's state machine. No message is read after `close`."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[InboxMessage] = asyncio.Queue()
        self.is_closed = False

    def put(self, message: InboxMessage) -> None:
        self._queue.put_nowait(message)

    async def get(self) -> InboxMessage:
        return await self._queue.get()

    def close(self) -> None:
        """Close the queue, and answer the callers of commands that were not handled."""
        self.is_closed = True
        for _ in range(self._queue.qsize()):
            match self._queue.get_nowait():
                case WorkerCommand(_, waiter) if not waiter.done():
                    waiter.set_exception(ModelUnavailable(SHUTTING_DOWN))
                case StopWorker(waiter) if not waiter.done():
                    waiter.set_result(None)
                case _:
                    pass


class Waiters:
    """Futures of callers that wait for the same outcome. Cancelled futures are ignored."""

    def __init__(self) -> None:
        self._futures: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        self._futures.append(waiter)

    def has_any(self) -> bool:
        return any(not future.done() for future in self._futures)

    def wake(self) -> None:
        for future in self._pop_pending():
            future.set_result(None)

    def refuse(self, reason: Callable[[], Exception]) -> None:
        """Set a new exception on each future: a shared one would collect the tracebacks of all tasks that raise it."""
        for future in self._pop_pending():
            future.set_exception(reason())

    def _pop_pending(self) -> list[Waiter]:
        futures, self._futures = self._futures, []
        return [future for future in futures if not future.done()]
