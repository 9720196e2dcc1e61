"""Inbox messages of a worker's state machine: commands of callers, and events of its own timers and watchers."""

from dataclasses import dataclass

from gateway.supervisor.ports import Process
from gateway.supervisor.waiters import Waiter
from protocol.failures import Failure
from protocol.messages import Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.spec import WorkerSpec


@dataclass(frozen=True, slots=True)
class Ensure:
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Load:
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Restart:
    waiter: Waiter


@dataclass(frozen=True, slots=True)
class Stop:
    waiter: Waiter
    drain_s: float
    is_closing: bool
    # What whoever waits is told, where it is neither of the ordinary reasons.
    reason: Failure | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """From now on another specification; with `is_reload` what runs is started anew with it."""

    spec: WorkerSpec
    load_timeout_s: float
    is_preload: bool
    is_reload: bool


@dataclass(frozen=True, slots=True)
class Adopt:
    process: Process
    epoch: int


@dataclass(frozen=True, slots=True)
class Evict:
    epoch: int


@dataclass(frozen=True, slots=True)
class Reopen:
    pass


@dataclass(frozen=True, slots=True)
class Recycle:
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
class Suspect:
    epoch: int


@dataclass(frozen=True, slots=True)
class Progressed:
    epoch: int


@dataclass(frozen=True, slots=True)
class Alarm:
    token: int


@dataclass(frozen=True, slots=True)
class Beat:
    pass


Message = Hello | Loading | Ready | Pong | Drained | Goodbye
Order = Ensure | Load | Restart | Stop | Change | Adopt | Evict | Reopen | Recycle
Mail = Order | Admitted | Denied | Exited | Suspect | Progressed | Alarm | Beat | Message
