"""Worker exits with their causes and consequences, and the restart policy (back-off, circuit breaker).

Worker exits: their causes, and their consequences for the worker's sequences, waiting callers and model.

Restart policy: whether and when a failed worker may be started again (back-off, circuit breaker).
"""

import logging
import signal
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from gateway.link.parked_sequences import ParkedSequences
from gateway.workers.supervisor.state import State
from protocol.failures import EXIT_MEANING, FINAL_EXITS, Code, ExitStatus, Failure
from protocol.from_worker import Goodbye

log = logging.getLogger(__name__)

# Status reported for an adopted worker, which is not a child process of this gateway.
UNKNOWN_EXIT: Final = 255
CODES: Final[dict[int | None, Code]] = {
    ExitStatus.BAD_CONFIG: Code.BAD_CONFIG,
    ExitStatus.MODEL_UNUSABLE: Code.MODEL_CORRUPT,
    ExitStatus.INCOMPATIBLE: Code.INCOMPATIBLE,
    ExitStatus.OUT_OF_MEMORY: Code.OUT_OF_MEMORY,
}
# Codes of final failures. They decide whether an exit is final if the worker's exit status cannot be read.
_FINAL_CODES: Final = frozenset(
    {Code.BAD_CONFIG, Code.MODEL_MISSING, Code.MODEL_CORRUPT, Code.MODEL_UNSUPPORTED, Code.INCOMPATIBLE}
)
# macOS writes a crash report for a process that is ended by one of these signals.
_REPORTED: Final = frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGTRAP})
_LOGGED_LINES: Final = 20


class Cause(Enum):
    """Cause of an exit. It is derived from the command that ended the worker, from the exit status and from the
    worker's last message.
    """

    # The gateway ended the worker: UNLOADED to unload its model or shut down, REPLACED to replace it or to make room.
    UNLOADED = auto()
    REPLACED = auto()
    # The worker exited with status 0 after it had been ready.
    CLEAN = auto()
    CRASHED = auto()
    # A rank exited because it lost another rank of its group, so its requests are not suspected of causing a crash.
    PARTNER_LOST = auto()
    # A restart cannot help: the model's files, the configuration or the protocol must change.
    FINAL = auto()
    INCOMPATIBLE = auto()


class SequenceAction(Enum):
    """Action to take with the sequences of a worker that has exited."""

    FAIL = auto()
    # The next worker resumes the sequences.
    RESUME = auto()
    # The next worker resumes the sequences; those without a token are suspected of causing the crash.
    SUSPECT = auto()


@dataclass(frozen=True, slots=True)
class ExitRule:
    """Consequences of an exit. `next` is the worker's next state, which the restart policy refines after a crash."""

    sequences: SequenceAction
    next: State
    # Action if the worker had not been ready. No request can have caused a failed load.
    while_loading: SequenceAction = SequenceAction.RESUME


EXITS: Final[Mapping[Cause, ExitRule]] = {
    Cause.UNLOADED: ExitRule(SequenceAction.FAIL, State.STOPPED, while_loading=SequenceAction.FAIL),
    Cause.REPLACED: ExitRule(SequenceAction.RESUME, State.STOPPED),
    Cause.CLEAN: ExitRule(SequenceAction.RESUME, State.STOPPED),
    Cause.CRASHED: ExitRule(SequenceAction.SUSPECT, State.BACKOFF),
    Cause.PARTNER_LOST: ExitRule(SequenceAction.RESUME, State.BACKOFF),
    Cause.FINAL: ExitRule(SequenceAction.SUSPECT, State.FAILED),
    Cause.INCOMPATIBLE: ExitRule(SequenceAction.SUSPECT, State.INCOMPATIBLE),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """Facts about a worker process that has exited. `title` is its name and epoch, `lines` the end of its output."""

    title: str
    model: str
    # Exit status; None for an adopted process, whose status cannot be read.
    status: int | None
    lines: list[str]
    goodbye: Goodbye | None
    # Reason why the gateway ended the worker, if the worker was at fault.
    fault: Failure | None
    # Reason that only the process handle knows, such as an ssh failure of a remote rank.
    known: Failure | None
    is_asked: bool
    is_replaced: bool
    was_ready: bool

    @property
    def cause(self) -> Cause:
        if self.is_asked:
            return Cause.REPLACED if self.is_replaced else Cause.UNLOADED
        code = self.goodbye.failure.code if self.goodbye is not None and self.goodbye.failure is not None else None
        fault_code = self.fault.code if self.fault is not None else None
        if self.status == ExitStatus.INCOMPATIBLE or Code.INCOMPATIBLE in (code, fault_code):
            return Cause.INCOMPATIBLE
        if self.status in FINAL_EXITS or (self.status is None and code in _FINAL_CODES):
            return Cause.FINAL
        if self.status == ExitStatus.PARTNER_LOST:
            return Cause.PARTNER_LOST
        return Cause.CLEAN if self._is_orderly and self.fault is None and self.was_ready else Cause.CRASHED

    @property
    def _is_orderly(self) -> bool:
        is_unknown = self.status is None and self.goodbye is not None and self.goodbye.failure is None
        return self.status == ExitStatus.OK or is_unknown

    def verdict(self) -> "Verdict":
        """Log this exit, and return its consequences."""
        rule, status, detail = EXITS[self.cause], self.status, "\n".join(self.lines)
        meaning = "its exit status is not known"
        if status is not None:
            meaning = EXIT_MEANING.get(status, f"exit status {status}")
        died = Failure(Code.WORKER_DIED, f"the worker of model '{self.model}' died ({meaning})", detail)
        failure = self.fault or self.known or (self.goodbye.failure if self.goodbye is not None else None)
        if failure is None and status in CODES:
            failure = Failure(CODES[status], f"model '{self.model}' cannot be loaded: {meaning}", detail)
        failure = failure or died
        if rule.next is State.STOPPED:
            log.info("worker %s has stopped", self.title)
        else:
            report = "\n".join([f"{failure.message}{crash_report(status)}", *self.lines[-_LOGGED_LINES:]])
            log.error("worker %s ended: %s", self.title, report)
        action = rule.sequences if self.was_ready else rule.while_loading
        stream_failure = died
        if action is SequenceAction.FAIL and self._is_orderly:
            stream_failure = Failure(Code.DRAINING, f"model '{self.model}' was stopped")
        if self.is_asked and status == -signal.SIGTERM:
            status = 0  # the worker was already exiting, without Python's handler for SIGTERM
        return Verdict(UNKNOWN_EXIT if status is None else status, rule.next, failure, action, stream_failure)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Consequences of one exit. `failure` is sent to waiting callers, `stream_failure` to sequences that end."""

    status: int
    next: State
    failure: Failure
    sequences: SequenceAction
    stream_failure: Failure

    def apply_to(self, parked: ParkedSequences) -> None:
        match self.sequences:
            case SequenceAction.FAIL:
                parked.fail_all(self.stream_failure)
            case SequenceAction.RESUME:
                parked.on_replacement()
            case SequenceAction.SUSPECT:
                parked.on_crash(self.stream_failure)


def crash_report(status: int | None, platform: str = sys.platform) -> str:
    """Describe where macOS writes a crash report some seconds after the exit; empty if it writes none."""
    if platform != "darwin" or status not in _REPORTED:
        return ""
    return "; crash report: in ~/Library/Logs/DiagnosticReports, of a service in /Library/Logs/DiagnosticReports"


FIRST_DELAY_S: Final = 0.5
DELAY_CAP_S: Final = 30.0
HEALTHY_S: Final = 60.0
CRASH_WINDOW_S: Final = 600.0
OPEN_WEIGHT: Final = 5
HALF_OPEN_INTERVAL_S: Final = 300.0
# A crash while loading counts as this many crashes, because a load costs minutes and gigabytes.
LOADING_WEIGHT: Final = 2


@dataclass(slots=True)
class Breaker:
    """Circuit breaker and back-off of one worker's crashes. Owned by `RestartPolicy`; times are monotonic seconds.

    The first crash after a healthy minute causes no delay. The n-th crash after that one delays the next start by up to
    0.5·2ⁿ⁻¹ s and at most 30 s, with full jitter. Five crashes in ten minutes open the breaker, and then one start
    every five minutes is allowed. A crash while loading counts twice. If the worker had generated a token before it
    crashed, earlier crashes no longer count for the breaker.
    """

    _streak: int = 0
    _crashes: deque[tuple[float, int]] = field(default_factory=deque[tuple[float, int]])

    def crash(self, now: float, *, is_loading: bool, healthy_s: float, is_useful: bool = False) -> None:
        """Count a crash of a worker that was ready for `healthy_s`."""
        if healthy_s >= HEALTHY_S:
            self._streak = 0
        if is_useful:
            self._crashes.clear()
        self._streak += 1
        self._crashes.append((now, LOADING_WEIGHT if is_loading else 1))

    def is_open(self, now: float) -> bool:
        while self._crashes and self._crashes[0][0] <= now - CRASH_WINDOW_S:
            self._crashes.popleft()
        return sum(weight for _, weight in self._crashes) >= OPEN_WEIGHT

    def delay_s(self, random: float) -> float:
        """Return the delay before the next start; `random` is uniform in [0, 1)."""
        if self._streak <= 1:
            return 0.0
        # The bound on the exponent avoids a float overflow.
        return random * min(DELAY_CAP_S, FIRST_DELAY_S * 2.0 ** min(self._streak - 2, 10))

    def reset(self) -> None:
        self._streak = 0
        self._crashes.clear()


class RestartPolicy:
    """Restart policy of one model's worker. Owned by the worker's state machine; times are monotonic seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._breaker = Breaker()
        self._next_start_at = 0.0
        self.last_failure: Failure | None = None
        # Whether any start will fail until the model or its configuration changes.
        self.is_final = False
        # Stamp of the model's files before the newest start.
        self._stamp: object = None
        self._has_crashed = False
        # Number of starts that followed a crash.
        self.restarts = 0

    @property
    def reason(self) -> Failure:
        """Return why the model is not available."""
        return self.last_failure or Failure(Code.INTERNAL, f"model '{self._model}' is not available")

    def may_start(self, now: float, stamp: object) -> bool:
        """Return whether a request may start the model. `stamp` is the present one of the model's files.

        A final failure ends when the files change: a download or an operator may have repaired them.
        """
        if self.is_final and stamp != self._stamp:
            self.reset()
        return not self.is_final and now >= self._next_start_at

    def wait_s(self, now: float) -> float:
        """Return the seconds until the next start is allowed; 0 if no start is planned."""
        return 0.0 if self.is_final else max(0.0, self._next_start_at - now)

    def note_start(self, stamp: object) -> None:
        """Record a start with the stamp of the model's files. A start that follows a crash is counted."""
        self._stamp = stamp
        self.restarts += self._has_crashed
        self._has_crashed = False

    def note_final(self, failure: Failure) -> None:
        """Record a failure that a restart cannot fix."""
        self.last_failure = failure
        self.is_final = True

    def note_crash(
        self, failure: Failure, now: float, random: float, healthy_s: float | None, *, is_useful: bool
    ) -> tuple[float, bool]:
        """Count a crash. Return the delay of the next start, and whether the breaker is open.

        `healthy_s` is how long the worker was ready; None if it crashed while loading.
        """
        self.last_failure = failure
        self._has_crashed = True
        self._breaker.crash(now, is_loading=healthy_s is None, healthy_s=healthy_s or 0.0, is_useful=is_useful)
        is_open = self._breaker.is_open(now)
        delay_s = HALF_OPEN_INTERVAL_S if is_open else self._breaker.delay_s(random)
        self._next_start_at = now + delay_s
        return delay_s, is_open

    def reset(self) -> None:
        """Forget the failures, because an operator tries again."""
        self._breaker.reset()
        self.is_final = False
        self._next_start_at = 0.0
