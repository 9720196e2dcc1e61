"""States, snapshots, limits and events of workers.

Time limits of a worker: start, heartbeat, stop and restart.

Ports of a worker's state machine: its effects on the machine, and the worker's process.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from gateway.link.link import WorkerLink
from gateway.link.parked_sequences import ResumeLimits
from gateway.link.sequence import LinkEvents
from protocol.failures import Code, Failure
from protocol.from_worker import Ready
from protocol.spec import WorkerSpec
from protocol.stats import Stats


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker and its memory; times in seconds."""

    heartbeat_s: float = 1.0
    # A worker is stuck if it has sent no Pong for `pong_s`, or if its loop is busy and its newest step is older than
    # `step_s`.
    pong_s: float = 15.0
    step_s: float = 60.0
    # A load may take `load_s`, and the time that its weights need at `load_bytes_per_s`.
    load_s: float = 600.0
    load_bytes_per_s: float = 50e6
    # A stuck process gets Dump, SIGABRT after `dump_s` and SIGKILL after `abort_s` more.
    dump_s: float = 0.5
    abort_s: float = 5.0
    # A worker that cannot be reached, and has not exited after this time, is stuck.
    suspect_s: float = 2.0
    # A worker that must stop gets Shutdown, SIGTERM after `term_s` and SIGKILL after `stop_grace_s`.
    term_s: float = 2.0
    grace_s: float = 10.0
    grace_bytes_per_s: float = 4e9
    # An exit is judged only after this time, because the worker's Goodbye may still be in the socket.
    goodbye_s: float = 0.03
    # A new connection must become routable within `greet_s`; an adopted worker must respond within `adopt_s`.
    greet_s: float = 5.0
    adopt_s: float = 10.0
    drain_s: float = 30.0
    resume: ResumeLimits = field(default_factory=ResumeLimits)
    # A loaded model stays in memory at least this long, so that requests that waited for it reach it.
    residency_s: float = 10.0
    # Memory is measured each `measure_interval_s`. The pressure level rises at most once per `squeeze_s`, and falls by
    # one after `relax_s` without pressure.
    measure_interval_s: float = 1.0
    squeeze_s: float = 3.0
    relax_s: float = 30.0
    # A worker that stays at least `creep_bytes` above its grant for `creep_s` is restarted. A model is restarted for
    # this at most once per `recycle_s`, and any model at most once per `recycle_gap_s`.
    creep_s: float = 10.0
    creep_bytes: int = 64 << 20
    recycle_s: float = 600.0
    recycle_gap_s: float = 60.0

    def load_timeout_s(self, weights_bytes: int) -> float:
        """Return the maximum duration of a load of weights of this size."""
        return self.load_s + weights_bytes / self.load_bytes_per_s

    def stop_grace_s(self, weights_bytes: int) -> float:
        """Return the seconds from Shutdown to SIGKILL. A process killed while it frees wired memory may leak it."""
        return self.grace_s + weights_bytes / self.grace_bytes_per_s


class State(StrEnum):
    """State of a worker. Only its own state machine changes it."""

    STOPPED = "stopped"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    STOPPING = "stopping"
    BACKOFF = "backoff"
    FAILED = "failed"
    INCOMPATIBLE = "incompatible"


SHUTTING_DOWN: Final = Failure(Code.DRAINING, "the server is shutting down")


class ModelUnavailable(Exception):
    """Raised when a model is not available. `retry_after_s` is 0 if a retry cannot help."""

    def __init__(self, failure: Failure, retry_after_s: float = 0.0) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.retry_after_s = retry_after_s


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of one worker."""

    name: str
    path: str
    state: State
    epoch: int = 0
    pid: int = 0
    is_adopted: bool = False
    # Whether the daemon counts as ready only after this worker is ready.
    is_preload: bool = False
    ready: Ready | None = None
    stats: Stats | None = None
    stage: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    since_s: float = 0.0
    restarts: int = 0
    last_failure: Failure | None = None
    retry_after_s: float = 0.0


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one loaded model. `floor_bytes` is its grant without loans."""

    share_bytes: int
    floor_bytes: int
    footprint_bytes: int
    idle_s: float
    is_gated: bool


class MemoryView(msgspec.Struct, frozen=True):
    """Snapshot of the memory grants; `waiting` are the models that wait for a grant, in order."""

    budget_bytes: int
    granted_bytes: int
    footprint_bytes: int
    waiting: tuple[str, ...]
    models: dict[str, ModelMemory]


class MemoryEvents(Protocol):
    """Events of the memory broker. Called on the event loop."""

    def memory_granted(self, model: str, wait_s: float, reason: str) -> None: ...
    def model_swapped_in(self, model: str, s: float) -> None: ...
    def model_evicted(self, model: str, reason: str) -> None: ...
    def memory_returned(self, model: str, part: float) -> None: ...
    def memory_trimmed(self, model: str) -> None: ...
    def memory_refused(self, model: str) -> None: ...
    def worker_recycled(self, model: str) -> None: ...
    def memory(self, view: MemoryView) -> None: ...


class Events(LinkEvents, MemoryEvents, Protocol):
    """Events of the pool and of the link. Called on the event loop: methods are cheap and never raise."""

    def worker_exit(self, model: str, status: int) -> None: ...
    def state(self, model: str, state: State) -> None: ...
    def load_seconds(self, model: str, s: float) -> None: ...
    def batch_mode(self, model: str, mode: str) -> None: ...
    def worker_stuck(self, model: str) -> None: ...
    def model_removed(self, model: str) -> None: ...


class WorkerPort(Protocol):
    """Worker process that this gateway started or adopted."""

    @property
    def pid(self) -> int: ...
    @property
    def is_adopted(self) -> bool: ...
    async def wait(self) -> int | None:
        """Wait for the exit. Return the status as `subprocess` reports it; None if the process is not a child."""
        ...

    def signal(self, signum: int) -> None:
        """Send a signal, unless the process has exited."""
        ...

    def last_lines(self) -> list[str]:
        """Return the last lines of the process's output."""
        ...

    def failure(self) -> Failure | None:
        """Return a reason for the exit that neither the exit status nor the Goodbye contains, or None."""
        ...

    def close(self) -> None:
        """Release the resources of the exited process, and remove its state file."""
        ...


@dataclass(frozen=True, slots=True)
class Effects:
    """Effects of a worker's state machine on the machine, and the link, events and time limits that all workers share.
    Tests inject clock and randomness.
    """

    link: WorkerLink
    events: Events
    limits: WorkerLimits
    # `admit` waits for memory and returns the worker's grant in bytes, 0 for no limit. It raises `ModelUnavailable` if
    # the model can never be granted any.
    admit: Callable[[WorkerSpec], Awaitable[int]]
    # `on_state` is called with a worker's name and its new state.
    on_state: Callable[[str, State], None]
    # `spawn` starts the process. It raises `OSError`.
    spawn: Callable[[WorkerSpec], WorkerPort]
    next_epoch: Callable[[], int]
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    random: Callable[[], float] = random.random
    # `stamp` returns a value that changes with the files of a specification's model.
    stamp: Callable[[WorkerSpec], object] = lambda _: None
