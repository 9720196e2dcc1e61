"""Table of worker exits: for each cause, what follows for the worker's sequences and for its model."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gateway.workers.supervisor.postmortem import ExitKind
from gateway.workers.supervisor.state import State
from protocol.failures import Code, Failure


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
