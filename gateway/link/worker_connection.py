"""Connection of the link to one incarnation of a worker, or to one stream at a peer."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.link.sequence import Sequence
from protocol.failures import Failure
from protocol.from_worker import AdaptersSet, Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.stats import Stats
from protocol.to_worker import Down, Generate


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A request could not be sent to the worker of this epoch: it is gone, or its queue is full."""

    epoch: int


@dataclass(frozen=True, slots=True)
class SequenceProgressed:
    """A watched sequence of this epoch has its first token, or has ended."""

    epoch: int


# Messages of a worker about itself, and observations of the link about it.
Report = Hello | Loading | Ready | Pong | Drained | Goodbye | AdaptersSet | SendFailed | SequenceProgressed


class FrameSender(Protocol):
    """Transport to a runner that is no worker of this gateway."""

    def prepare(self, request: Generate) -> Generate:
        """Return the request as this transport sends it."""
        ...

    def send(self, message: Down, frame: bytes) -> None:
        """Send a message, which `frame` contains as it is encoded for a worker. Raises `WorkerGone`."""
        ...


@dataclass(slots=True, eq=False)
class Connection:
    """One attached epoch. Written by the link alone; it stays readable after the epoch is detached.

    `post` puts a report into the supervisor's queue, and `park` receives each sequence that the worker has lost.
    Neither calls the link.
    """

    name: str
    epoch: int
    post: Callable[[Report], None]
    park: Callable[[Sequence], None]
    sender: FrameSender | None = None
    stats: Stats | None = None
    # Sending a request has failed: no more are submitted here.
    is_unreachable: bool = False
    # It was sent a Drain with a deadline, or a Shutdown: sequences that it ends from now on are not resumed.
    is_ending: bool = False
    # Rids whose Abort was sent and whose end the worker has not confirmed. A growing number is a stuck worker.
    unacked_aborts: set[int] = field(default_factory=set[int])

    def prepare(self, request: Generate) -> Generate:
        return request if self.sender is None else self.sender.prepare(request)


class Runner(Protocol):
    """Destination of requests: a worker, or a stream at a peer."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_ready(self) -> bool:
        """Whether it takes new requests."""
        ...

    def refusal(self, request: Generate) -> Failure | None:
        """The reason to refuse this request, if any."""
        ...
