"""Times of a drafting model: one slow draft decides nothing, and nothing is decided for ever."""

from collections.abc import Sequence

import pytest

from tests.support.drafted import Drafted
from worker.speculation import policy as module
from worker.speculation.draft_state import DraftedRow
from worker.speculation.drafter import Draw, Proposer, Rows
from worker.speculation.policy import Proposals
from worker.speculation.text_sources import Tokens

PLAIN_S = 0.010


class Steady(Proposer):
    """Proposer whose drafts take as long as the test's clock says."""

    source = "draft"

    @property
    def nbytes(self) -> int:
        return 0

    def begin(self, draw: Draw, rows: Rows) -> None:
        pass

    def end(self) -> None:
        pass

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        return [[1] * count for _ in rows]


def draft(proposals: Proposals, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Draft one token that takes so long."""
    times = iter([0.0, seconds])
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "perf_counter", lambda: next(times))
        proposals.propose(1, [Drafted()], [[]], [0], 2)  # type: ignore[list-item]  # no text is looked at


def test_a_first_draft_that_compiled_kernels_does_not_end_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    proposals = Proposals(Steady())
    untried = proposals.seconds(1, 2, PLAIN_S)
    draft(proposals, monkeypatch, 3.0)
    assert proposals.seconds(1, 2, PLAIN_S) == untried
    draft(proposals, monkeypatch, 0.002)
    assert proposals.seconds(1, 2, PLAIN_S) == pytest.approx(0.002)
    draft(proposals, monkeypatch, 3.0)
    assert proposals.seconds(1, 2, PLAIN_S) == pytest.approx(0.002)


def test_drafting_that_was_slow_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    proposals = Proposals(Steady())
    untried = proposals.seconds(1, 2, PLAIN_S)
    for _ in range(2):
        draft(proposals, monkeypatch, 3.0)
    assert proposals.seconds(1, 2, PLAIN_S) == pytest.approx(3.0)
    assert any(proposals.seconds(1, 2, PLAIN_S) == untried for _ in range(3000))
