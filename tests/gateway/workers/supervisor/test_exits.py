from itertools import product

import pytest

from gateway.workers.supervisor.exits import EXITS, Cause, SequenceAction, cause_of
from gateway.workers.supervisor.postmortem import ExitKind
from gateway.workers.supervisor.state import State
from protocol.failures import Code, Failure

STUCK = Failure(Code.WORKER_DIED, "stuck")
ALIEN = Failure(Code.INCOMPATIBLE, "another protocol")


def cause(kind: ExitKind, blame: Failure | None = None, *, was_ready: bool = True) -> Cause:
    return cause_of(kind, blame, is_asked=False, is_replaced=False, was_ready=was_ready)


@pytest.mark.parametrize(("kind", "blame", "was_ready"), list(product(ExitKind, (None, STUCK, ALIEN), (False, True))))
def test_an_exit_that_was_asked_for_is_no_crash_whatever_its_status(
    kind: ExitKind, blame: Failure | None, was_ready: bool
) -> None:
    for is_replaced, expected in ((False, Cause.UNLOADED), (True, Cause.REPLACED)):
        got = cause_of(kind, blame, is_asked=True, is_replaced=is_replaced, was_ready=was_ready)
        assert got is expected


def test_only_an_orderly_exit_of_a_ready_worker_without_blame_is_clean() -> None:
    assert cause(ExitKind.STOPPED) is Cause.CLEAN
    assert cause(ExitKind.STOPPED, was_ready=False) is Cause.CRASHED
    assert cause(ExitKind.STOPPED, STUCK) is Cause.CRASHED
    assert cause(ExitKind.CRASHED) is Cause.CRASHED


def test_a_protocol_mismatch_counts_before_the_exit_status() -> None:
    assert {cause(kind, ALIEN) for kind in ExitKind} == {Cause.INCOMPATIBLE}
    assert cause(ExitKind.INCOMPATIBLE, STUCK) is Cause.INCOMPATIBLE
    assert cause(ExitKind.FINAL, STUCK) is Cause.FINAL


def test_every_cause_has_a_settled_state_and_no_failed_load_makes_suspects() -> None:
    assert set(EXITS) == set(Cause)
    for exit in EXITS.values():
        assert exit.next in {State.STOPPED, State.BACKOFF, State.FAILED, State.INCOMPATIBLE}
        assert exit.while_loading is not SequenceAction.SUSPECT
