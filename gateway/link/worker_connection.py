"""Connection of the link to one incarnation of a worker, or to one stream at a peer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.link.sequence import Sequence
from protocol.failures import Failure
from protocol.from_worker import AdaptersSet, Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.stats import Stats
from protocol.to_worker import Generate


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A request could not be sent to the worker of this epoch: it is gone, or takes nothing."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """A watched sequence of this epoch has its first token, or has ended."""

    epoch: int


# Messages of a worker about itself, and what the link has noticed of it.
Report = Hello | Loading | Ready | Pong | Drained | Goodbye | AdaptersSet | SendFailed | Progressed


class Carrier(Protocol):
    """A way to a runner that is no worker of this gateway."""

    def addressed(self, request: Generate) -> Generate:
        """A request as it is sent this way."""
        ...

    def carry(self, frame: bytes) -> None:
        """Send a frame, as it is made for a worker. Raises `WorkerGone`."""
        ...


@dataclass(slots=True, eq=False)
class Connection:
    """One attached epoch. Written by the link alone; it stays readable after the epoch is detached.

    The link knows a worker only as two callbacks: `post` puts a report into a queue, and `park` takes each sequence
    that the worker has lost. Neither calls the link.
    """

    name: str
    epoch: int
    post: Callable[[Report], None]
    park: Callable[[Sequence], None]
    carrier: Carrier | None = None
    # The newest numbers that the worker has sent.
    stats: Stats | None = None
    # A request could not be sent: the next one must not come here.
    is_unreachable: bool = False
    # It was sent a Drain with a deadline, or a Shutdown: what it ends from now on has ended.
    is_ending: bool = False

    def addressed(self, request: Generate) -> Generate:
        return request if self.carrier is None else self.carrier.addressed(request)


class Runner(Protocol):
    """A worker, or a stream at a peer, that requests are submitted to."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_ready(self) -> bool:
        """It takes new requests."""
        ...

    def refusal(self, request: Generate) -> Failure | None:
        """Reason why it must not get this request, if any."""
        ...
