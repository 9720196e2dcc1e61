"""What arrives in a worker's inbox besides messages: commands from others, and what its own chores report."""

from dataclasses import dataclass

from gateway.pool.effects import Process
from gateway.pool.waiters import Waiter
from protocol.messages import Drained, Goodbye, Hello, Loading, Pong, Ready


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


@dataclass(frozen=True, slots=True)
class Adopt:
    process: Process
    epoch: int


@dataclass(frozen=True, slots=True)
class Admitted:
    epoch: int


@dataclass(frozen=True, slots=True)
class Exited:
    epoch: int
    status: int | None


@dataclass(frozen=True, slots=True)
class Suspect:
    epoch: int


@dataclass(frozen=True, slots=True)
class Acquit:
    epoch: int


@dataclass(frozen=True, slots=True)
class Alarm:
    token: int


@dataclass(frozen=True, slots=True)
class Beat:
    pass


Message = Hello | Loading | Ready | Pong | Drained | Goodbye
Mail = Ensure | Load | Restart | Stop | Adopt | Admitted | Exited | Suspect | Acquit | Alarm | Beat | Message
