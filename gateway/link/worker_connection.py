"""Connection of the link to one incarnation of a worker."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gateway.link.sequence import Sequence
from protocol.failures import Failure
from protocol.from_worker import AdaptersSet, Drained, Goodbye, Hello, Loading, Pong, Ready
from protocol.stats import Stats
from protocol.to_worker import Generate


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Report: a request could not be sent to the worker of this epoch, because the worker is gone or its
    queue is full.
    """

    epoch: int


@dataclass(frozen=True, slots=True)
class SequenceProgressed:
    """Report: a watched sequence of this epoch has its first token or has ended."""

    epoch: int


# Messages that a worker sends about itself, and what the link observes about the worker.
Report = Hello | Loading | Ready | Pong | Drained | Goodbye | AdaptersSet | SendFailed | SequenceProgressed


@dataclass(slots=True, eq=False)
class Connection:
    """State of one attached epoch. It can still be read after the epoch is detached. Only the link writes it.

    `post` puts a report into the supervisor's queue, and `park` receives each sequence that the worker has lost.
    Neither calls the link.
    """

    name: str
    epoch: int
    post: Callable[[Report], None]
    park: Callable[[Sequence], None]
    stats: Stats | None = None
    # True once a request could not be sent. No more requests are then submitted to this epoch.
    is_unreachable: bool = False
    # True once the worker was sent a Drain with a deadline, or a Shutdown. Sequences that it ends afterwards are not
    # resumed.
    is_ending: bool = False
    # Rids of aborted sequences whose end the worker has not confirmed. A number that keeps growing means that the
    # worker is stuck.
    unacked_aborts: set[int] = field(default_factory=set[int])


class Runner(Protocol):
    """Destination of requests: a worker."""

    @property
    def name(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def is_ready(self) -> bool:
        """Whether the runner takes new requests."""
        ...

    def refusal(self, request: Generate) -> Failure | None:
        """Return the reason to refuse a request, or None."""
        ...
