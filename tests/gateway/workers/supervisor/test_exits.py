from dataclasses import replace
from itertools import product

import pytest

from gateway.workers.supervisor.exits_and_restarts import EXITS, Cause, SequenceAction, WorkerExit
from gateway.workers.supervisor.state import State
from protocol.failures import Code, ExitStatus, Failure

STUCK = Failure(Code.WORKER_DIED, "stuck")
ALIEN = Failure(Code.INCOMPATIBLE, "another protocol")
STATUSES = (0, -9, ExitStatus.PARTNER_LOST, ExitStatus.BAD_CONFIG, ExitStatus.INCOMPATIBLE, None)


def ended(status: int | None, fault: Failure | None = None, *, was_ready: bool = True) -> WorkerExit:
    return WorkerExit(
        title="m#1",
        model="m",
        status=status,
        lines=[],
        goodbye=None,
        fault=fault,
        known=None,
        is_asked=False,
        is_replaced=False,
        was_ready=was_ready,
    )


@pytest.mark.parametrize(("status", "fault", "was_ready"), list(product(STATUSES, (None, STUCK, ALIEN), (False, True))))
def test_an_exit_that_was_asked_for_is_no_crash_whatever_its_status(
    status: int | None, fault: Failure | None, was_ready: bool
) -> None:
    exit = replace(ended(status, fault, was_ready=was_ready), is_asked=True)
    assert exit.cause is Cause.UNLOADED
    assert replace(exit, is_replaced=True).cause is Cause.REPLACED


def test_only_an_orderly_exit_of_a_ready_worker_without_fault_is_clean() -> None:
    assert ended(0).cause is Cause.CLEAN
    assert ended(0, was_ready=False).cause is Cause.CRASHED
    assert ended(0, STUCK).cause is Cause.CRASHED
    assert ended(-9).cause is Cause.CRASHED


def test_a_protocol_mismatch_counts_before_the_exit_status() -> None:
    assert {ended(status, ALIEN).cause for status in STATUSES} == {Cause.INCOMPATIBLE}
    assert ended(ExitStatus.INCOMPATIBLE, STUCK).cause is Cause.INCOMPATIBLE
    assert ended(ExitStatus.BAD_CONFIG, STUCK).cause is Cause.FINAL


def test_a_lost_partner_is_retried_and_no_request_is_suspected() -> None:
    cause = ended(ExitStatus.PARTNER_LOST).cause
    assert cause is Cause.PARTNER_LOST
    assert (EXITS[cause].sequences, EXITS[cause].next) == (SequenceAction.RESUME, State.BACKOFF)


def test_every_cause_has_a_settled_state_and_no_failed_load_makes_suspects() -> None:
    assert set(EXITS) == set(Cause)
    for exit in EXITS.values():
        assert exit.next in {State.STOPPED, State.BACKOFF, State.FAILED, State.INCOMPATIBLE}
        assert exit.while_loading is not SequenceAction.SUSPECT
