"""Table of worker exits: for each cause, what follows for the worker's sequences and for its model."""

import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gateway.link.failover import ParkedSequences
from gateway.workers.supervisor.postmortem import ExitKind, crash_report, examine
from gateway.workers.supervisor.state import State
from protocol.failures import Code, Failure
from protocol.from_worker import Goodbye

log = logging.getLogger(__name__)

# The status that `Events.worker_exit` is given for an adopted worker, which is not our child.
UNKNOWN_EXIT: Final = 255


class Cause(Enum):
    """Cause of an exit, by what was asked of the worker and how it ended."""

    # Asked to end: by an unload or the shutdown; for its successor, or to make room.
    UNLOADED = auto()
    REPLACED = auto()
    # Ended by itself, in order, after it had been ready.
    CLEAN = auto()
    CRASHED = auto()
    # A rank of its group that lost another: no request of its own is to fault.
    PARTNER_LOST = auto()
    # Another start cannot help: the model's files or configuration, or another protocol.
    FINAL = auto()
    INCOMPATIBLE = auto()


class SequenceAction(Enum):
    """Action on the sequences that a worker leaves."""

    FAIL = auto()
    # They go on at the next worker, and none is suspected.
    RESUME = auto()
    # They go on at the next worker, but for those that crash workers.
    SUSPECT = auto()


@dataclass(frozen=True, slots=True)
class ExitRule:
    """Consequences of an exit. `next` is the settled state; the restart policy refines that of a crash."""

    sequences: SequenceAction
    next: State
    # Of a worker that had not been ready: a load that fails says nothing about requests.
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


def cause_of(kind: ExitKind, fault: Failure | None, *, is_asked: bool, is_replaced: bool, was_ready: bool) -> Cause:
    """The cause of an exit. `fault` is the reason for which the gateway ended the worker, if it was at fault."""
    if is_asked:
        return Cause.REPLACED if is_replaced else Cause.UNLOADED
    if kind is ExitKind.INCOMPATIBLE or (fault is not None and fault.code is Code.INCOMPATIBLE):
        return Cause.INCOMPATIBLE
    if kind is ExitKind.FINAL:
        return Cause.FINAL
    if kind is ExitKind.PARTNER_LOST:
        return Cause.PARTNER_LOST
    is_clean = kind is ExitKind.STOPPED and fault is None and was_ready
    return Cause.CLEAN if is_clean else Cause.CRASHED


@dataclass(frozen=True, slots=True)
class LastFacts:
    """Facts about a process that has exited. `fault` is the reason for which the gateway ended it, if it was at fault;
    `title` is its name and epoch."""

    title: str
    model: str
    goodbye: Goodbye | None
    fault: Failure | None
    # The reason that its process gives, which the worker itself does not know: that of ssh, of a rank elsewhere.
    known: Failure | None
    is_asked: bool
    is_replaced: bool
    was_ready: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """Consequences of one exit. `failure` is for callers that wait, `stream_failure` for sequences that end."""

    status: int
    next: State
    failure: Failure
    sequences: SequenceAction
    stream_failure: Failure

    def dispose_of(self, parked: ParkedSequences) -> None:
        """Do with the sequences of the worker what follows for them."""
        match self.sequences:
            case SequenceAction.FAIL:
                parked.fail_all(self.stream_failure)
            case SequenceAction.RESUME:
                parked.on_replacement()
            case SequenceAction.SUSPECT:
                parked.on_crash(self.stream_failure)


def judge(status: int | None, lines: list[str], facts: LastFacts) -> Verdict:
    """The verdict on an exit, which goes to the log. `lines` are the end of the output."""
    report = examine(facts.model, status, facts.goodbye, lines, facts.known)
    cause = cause_of(
        report.kind, facts.fault, is_asked=facts.is_asked, is_replaced=facts.is_replaced, was_ready=facts.was_ready
    )
    exit = EXITS[cause]
    failure = facts.fault or report.failure
    if exit.next is State.STOPPED:
        log.info("worker %s has stopped", facts.title)
    else:
        report_lines = "\n".join([f"{failure.message}{crash_report(status)}", *lines[-20:]])
        log.error("worker %s ended: %s", facts.title, report_lines)
    action = exit.sequences if facts.was_ready else exit.while_loading
    stream_failure = report.stream_failure
    if action is SequenceAction.FAIL and report.kind is ExitKind.STOPPED:
        stream_failure = Failure(Code.DRAINING, f"model '{facts.model}' was stopped")
    # SIGTERM: it was leaving, and our reminder came when Python was already down.
    known = 0 if facts.is_asked and status == -signal.SIGTERM else status
    return Verdict(UNKNOWN_EXIT if known is None else known, exit.next, failure, action, stream_failure)
