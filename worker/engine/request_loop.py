"""Request loop: the commands, deadlines, drain and ends that the loops of all kinds of models share.

Every request that enters leaves through `_finish`, exactly once.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar

from protocol.failures import Code, Failure
from protocol.from_worker import Accepted, Drained, Finish, Rejected, Up
from protocol.spec import WorkerSpec
from protocol.to_worker import BATCH_PRIORITY, Abort, Drain, Shutdown
from worker.engine.gauges import Gauges
from worker.engine.output import Outbox

log = logging.getLogger("mlxd.worker")

# This limit is far above the number of requests that can be in the intake at once.
_MAX_EARLY_ABORTS: Final = 1 << 16
STOPPING: Final = Failure(Code.DRAINING, "the model is being stopped; try again")
_QUEUE_FULL: Final = Failure(Code.BUSY, "the model's queue is full; try again")
_LATE: Final = Failure(Code.DEADLINE_EXCEEDED, "the request's deadline has passed")


class LoopRequest(Protocol):
    """Request of a loop. `arrived` and `deadline` are times of the monotonic clock."""

    @property
    def rid(self) -> int: ...
    @property
    def priority(self) -> int: ...
    @property
    def arrived(self) -> float: ...
    @property
    def deadline(self) -> float | None: ...


R = TypeVar("R", bound=LoopRequest)


class RequestLoop(Generic[R]):
    """Owner of the requests of one model. All methods run on the loop's thread, the only one that uses MLX."""

    def __init__(
        self, spec: WorkerSpec, gauges: Gauges, send: Callable[[Up], None], *, one_delta_per_frame: bool = False
    ) -> None:
        self._spec = spec
        self._gauges = gauges
        self._outbox = Outbox(spec.epoch, gauges, send, one_delta_per_frame=one_delta_per_frame)
        self._requests: dict[int, R] = {}
        # Ids of those that belong to batches, and yield to all others.
        self._batched: set[int] = set()
        # Aborts that overtook their requests: a grammar or a long prompt can keep a request in the intake for minutes.
        self._early_aborts: dict[int, None] = {}
        self._drain_until: float | None = None
        self._drain_aborted = 0
        # Time at which the newest drain ended. Requests that arrived before that time are refused as well.
        self._drained_at = float("-inf")
        self._is_stopping = False

    def fail_all(self, failure: Failure) -> None:
        """Send the terminal event of every request before the loop dies."""
        self._end_all(failure)

    def _end_all(self, failure: Failure = STOPPING) -> None:
        for request in list(self._requests.values()):
            self._finish(request, Finish.ERROR, failure)
        self._flush()

    # -- for a subclass ----------------------------------------------------------------------------------------------

    def _accepted(self, request: R) -> Accepted:
        """Return the answer to a request that is accepted."""
        raise NotImplementedError

    def _enter(self, request: R) -> None:
        """Queue an accepted request."""
        raise NotImplementedError

    def _finish(self, request: R, finish: Finish, failure: Failure | None = None) -> None:
        """End a request and remove it from `_requests`."""
        raise NotImplementedError

    @property
    def _is_full(self) -> bool:
        """Whether no more requests may wait."""
        raise NotImplementedError

    @property
    def _yields(self) -> bool:
        """Whether the requests of batches must wait, because there is another request."""
        return 0 < len(self._batched) < len(self._requests)

    def _first_to_yield(self, requests: Iterable[R]) -> R | None:
        """Return the first of these requests that must wait, because it belongs to a batch and there is another one."""
        return next((each for each in requests if each.rid in self._batched), None) if self._yields else None

    def _guarded(self, act: Callable[[], None]) -> None:
        """Call `act`; a subclass may recover from its errors."""
        act()

    def _measure(self) -> None:
        """Update the memory gauges."""
        self._gauges.measure_memory()

    # -- commands ----------------------------------------------------------------------------------------------------

    @property
    def _is_idle(self) -> bool:
        return not self._requests and self._drain_until is None

    def _idle(self) -> None:
        """Update the gauges before the loop blocks until the next command."""
        self._gauges.running = self._gauges.waiting = 0
        self._gauges.busy_since = 0.0
        self._gauges.measure_memory()

    def _handle_all(self, commands: Sequence[Any]) -> None:
        """Handle commands, aborts first."""
        for command in sorted(commands, key=lambda command: not isinstance(command, Abort)):
            self._guarded(partial(self._handle, command))

    def _handle(self, command: R | Abort | Drain | Shutdown) -> None:
        """Handle a command. A subclass handles the commands for its own kind of model first."""
        match command:
            case Abort():
                for rid in command.rids:
                    self._guarded(partial(self._abort, rid))
            case Drain():
                self._drain_until = time.monotonic() + command.deadline_s
            case Shutdown():
                self._is_stopping = True
            case _:
                self._enqueue(command)

    def _abort(self, rid: int) -> None:
        if (request := self._requests.get(rid)) is not None:
            self._finish(request, Finish.ABORT)
            return
        self._early_aborts[rid] = None
        if len(self._early_aborts) > _MAX_EARLY_ABORTS:
            del self._early_aborts[next(iter(self._early_aborts))]

    def _enqueue(self, request: R) -> None:
        rid = request.rid
        if rid in self._requests:  # the one terminal event of this rid belongs to the earlier request
            log.error("request %d arrived twice; the second was dropped", rid)
            return
        if self._drain_until is not None or request.arrived <= self._drained_at:
            self._outbox.send(Rejected(rid, STOPPING))
            return
        if self._is_full:
            self._outbox.send(Rejected(rid, _QUEUE_FULL))
            return
        self._outbox.send(self._accepted(request))
        self._requests[rid] = request
        if request.priority >= BATCH_PRIORITY:
            self._batched.add(rid)
        if rid in self._early_aborts:
            del self._early_aborts[rid]
            self._finish(request, Finish.ABORT)
        else:
            self._enter(request)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for request in [each for each in self._requests.values() if each.deadline is not None and now >= each.deadline]:
            self._finish(request, Finish.ERROR, _LATE)
        if self._drain_until is None:
            return
        if self._requests and now >= self._drain_until:
            self._drain_aborted = max(self._drain_aborted, len(self._requests))
            self._end_all()
        if not self._requests:
            self._flush()
            answer = Drained(self._spec.epoch, self._drain_aborted)
            self._drain_until, self._drain_aborted, self._drained_at = None, 0, time.monotonic()
            self._outbox.send(answer)

    def _flush(self) -> None:
        self._gauges.busy_since = time.monotonic()
        self._outbox.flush(self._measure)
