"""Ports of a worker's state machine: the real ones are in spawn.py, link.py and effects.py of the pool."""

from collections.abc import Iterable
from typing import Protocol

from gateway.link.sequence import Runner, Sequence, WorkerConnection
from gateway.workers.supervisor.state import State
from protocol.failures import Failure
from protocol.messages import Down
from protocol.spec import WorkerSpec


class WorkerPort(Protocol):
    """A worker process, started by us or adopted."""

    @property
    def pid(self) -> int: ...
    @property
    def is_adopted(self) -> bool: ...
    async def wait(self) -> int | None:
        """Its exit status as subprocess reports it; None when it was not our child."""
        ...

    def signal(self, signum: int) -> None:
        """Send a signal; nothing happens when it has exited."""
        ...

    def last_lines(self) -> list[str]:
        """The end of its output."""
        ...

    def failure(self) -> Failure | None:
        """The reason why it has exited, where its exit status and last message do not tell all of it."""
        ...

    def close(self) -> None:
        """Release what it holds here, and its state file. It has exited."""
        ...


class Effects(Protocol):
    """Clock, chance and processes."""

    def now(self) -> float: ...
    async def sleep(self, s: float) -> None: ...
    def random(self) -> float: ...
    def next_epoch(self) -> int: ...
    async def admit(self, spec: WorkerSpec) -> int:
        """Return when the machine has room for this worker: its share in bytes, 0 for no limit. May be cancelled.

        Raises `ModelUnavailable` when there will never be room.
        """
        ...

    def overload(self, model: str) -> Failure | None:
        """The reason to refuse new requests of a ready model: there is no memory for more."""
        ...

    def entered(self, model: str, state: State) -> None:
        """A worker is in another state. In a settled one but `ready` it has no process."""
        ...

    def spawn(self, spec: WorkerSpec) -> WorkerPort:
        """Start the process. Raises `OSError`."""
        ...


class WorkerWire(Protocol):
    """The part of the link that a state machine uses."""

    boot: int

    def attach(self, runner: Runner) -> WorkerConnection: ...
    def detach(self, epoch: int) -> list[Sequence]: ...
    def resume(self, worker: Runner, sequence: Sequence) -> None: ...
    def fail(self, sequences: Iterable[Sequence], failure: Failure) -> None: ...
    def expire(self, sequences: Iterable[Sequence]) -> None: ...
    def send(self, runner: Runner, message: Down) -> None: ...
    def ping(self, runner: Runner, t_ns: int) -> None: ...
