"""Inbox messages of a worker's state machine: commands of callers, and events of its own timers and watchers."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from gateway.link.worker_connection import Report, SendFailed, SequenceProgressed
from gateway.workers.supervisor.ports import WorkerPort
from gateway.workers.supervisor.state import SHUTTING_DOWN, ModelUnavailable
from protocol.failures import Failure
from protocol.from_worker import AdaptersSet, Drained, Goodbye, Hello, Loading, Ready
from protocol.spec import WorkerSpec

Waiter = asyncio.Future[None]


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
    | Report
)
# Reports of one incarnation, which count until another has taken its place. (A Pong is fenced by the link.)
OfEpoch = (
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


class WorkerInbox:
    """Queue of one worker's state machine. Once closed, no one takes from it any more."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[InboxMessage] = asyncio.Queue()
        self.is_closed = False

    def put(self, message: InboxMessage) -> None:
        self._queue.put_nowait(message)

    async def get(self) -> InboxMessage:
        return await self._queue.get()

    def close(self) -> None:
        """Answer the callers whose commands were not handled; later ones are refused."""
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
    """Futures of callers that wait for the same; each is answered once. Those whose caller has left are ignored."""

    def __init__(self) -> None:
        self._futures: list[Waiter] = []

    def add(self, waiter: Waiter) -> None:
        self._futures.append(waiter)

    def has_any(self) -> bool:
        return any(not future.done() for future in self._futures)

    def wake(self) -> None:
        """Give each its result."""
        for future in self._take():
            future.set_result(None)

    def refuse(self, reason: Callable[[], Exception]) -> None:
        """Give each an exception of its own: one raised in several tasks gathers their frames."""
        for future in self._take():
            future.set_exception(reason())

    def _take(self) -> list[Waiter]:
        futures, self._futures = self._futures, []
        return [future for future in futures if not future.done()]
