"""States, snapshots, limits and events of workers, shared by the supervisor, the pool and their readers."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol

import msgspec

from gateway.link.events import LinkEvents
from gateway.link.failover import ResumeLimits
from protocol.failures import Code, Failure
from protocol.from_worker import Ready
from protocol.stats import Stats


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
    """The model is not available. `retry_after_s` is 0 when trying again cannot help until something is changed."""

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
    # Whether the daemon is not complete without it.
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
    """Memory of one loaded model; `floor_bytes` is what it cannot run without."""

    share_bytes: int
    floor_bytes: int
    footprint_bytes: int
    idle_s: float
    is_gated: bool


class MemoryView(msgspec.Struct, frozen=True):
    """Snapshot of the memory grants; `waiting` are models for which room is being made, in order."""

    budget_bytes: int
    granted_bytes: int
    footprint_bytes: int
    waiting: tuple[str, ...]
    models: dict[str, ModelMemory]


class MemoryEvents(Protocol):
    """Events of the memory broker. Called on the event loop."""

    def granted(self, model: str, wait_s: float, reason: str) -> None: ...
    def swapped(self, model: str, s: float) -> None: ...
    def evicted(self, model: str, reason: str) -> None: ...
    def memory_returned(self, model: str, part: float, s: float) -> None: ...
    def trimmed(self, model: str) -> None: ...
    def refused(self, model: str) -> None: ...
    def recycled(self, model: str) -> None: ...
    def memory(self, view: MemoryView) -> None: ...


class Events(LinkEvents, MemoryEvents, Protocol):
    """Events of the pool and of the link. Called on the event loop: cheap, and never raises."""

    def worker_exit(self, model: str, status: int) -> None: ...
    def state(self, model: str, state: State) -> None: ...
    def load_seconds(self, model: str, s: float) -> None: ...
    def batch_mode(self, model: str, mode: str) -> None: ...
    def stuck(self, model: str) -> None: ...
    def removed(self, model: str) -> None: ...


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Limits of a worker and its memory; times in seconds."""

    heartbeat_s: float = 1.0
    # No Pong for this long while the process lives, or a step older than that: stuck.
    pong_s: float = 15.0
    step_s: float = 60.0
    # Our own loop did not run for this long (sleep, a stopped process): no worker is to blame.
    blackout_s: float = 5.0
    dump_s: float = 0.5
    abort_s: float = 5.0
    # A worker that could not be reached dies within this, or is stuck.
    suspect_s: float = 2.0
    # From Shutdown to SIGTERM, and to SIGKILL: the last one grows with the weights.
    term_s: float = 2.0
    grace_s: float = 10.0
    grace_bytes_per_s: float = 4e9
    # The last words of a worker that exits by itself may still be on the way.
    goodbye_s: float = 0.03
    # How long a new connection may take to become routable, and an adopted worker to answer.
    greet_s: float = 5.0
    adopt_s: float = 10.0
    drain_s: float = 30.0
    resume: ResumeLimits = field(default_factory=ResumeLimits)
    # How often memory is looked at; how long one measure gets before the next, and how long all must be well before
    # one is taken back.
    look_s: float = 1.0
    squeeze_s: float = 3.0
    relax_s: float = 30.0
    # A worker that stays above its share for this long in spite of all is started again: one model, and any, so often.
    creep_s: float = 10.0
    creep_bytes: int = 64 << 20
    recycle_s: float = 600.0
    recycle_gap_s: float = 60.0

    def stop_grace_s(self, weights_bytes: int) -> float:
        """From Shutdown to SIGKILL: freeing wired memory takes time, and killing amid it strands it."""
        return self.grace_s + weights_bytes / self.grace_bytes_per_s
