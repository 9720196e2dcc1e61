"""States, snapshots, limits and events of workers."""

from enum import StrEnum
from typing import Final, Protocol

import msgspec

from gateway.link.events import LinkEvents
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
    """Memory of one loaded model. `floor_bytes` is its share without loans."""

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
