"""The speculator drafts where it pays, and learns which drafts are right."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from tests.support.drafted import Drafted
from worker.speculation.draft_state import DraftedCounts, DraftedRow, Drafting
from worker.speculation.drafter import Draw, Rows
from worker.speculation.policy import Speculator
from worker.speculation.text_sources import DraftSource, Tokens

TEXT = list(range(20, 60))


@pytest.fixture
def row() -> Drafted:
    return Drafted()


def plain(speculator: Speculator, seconds: float) -> None:
    """Let plain steps of one row take so long."""
    for _ in range(2):
        speculator.costs.observe_step(1, 1, seconds)


def followed(
    row: Drafted, prompt: Sequence[int], drafting: Drafting | None = None, seconds: float = 0.01
) -> Speculator:
    """A device whose plain step takes so long, and one row on it."""
    speculator = Speculator()
    speculator.add(row, np.array(prompt, dtype=np.int32), drafting or Drafting())
    plain(speculator, seconds)
    return speculator


def generate(speculator: Speculator, row: Drafted, text: Sequence[int], cost: float = 0.01) -> int:
    """Let the row generate `text`; returns the steps that it took, each of `cost` seconds times its width."""
    steps, at = 0, 0
    while at < len(text):
        steps += 1
        draft: list[int] = []
        if speculator.is_ready([row], [len(text) - at - 1]):
            draft = speculator.drafts([row], [text[at]], [len(text) - at - 1])[0]
        right = next((n for n, token in enumerate(draft) if token != text[at + 1 + n]), len(draft))
        if draft:
            speculator.verified([row], [draft], [right])
        speculator.note(row, text[at : at + 1 + right])
        speculator.costs.observe_step(1, 1 + len(draft), 0.01 + cost * len(draft), 1 + right)
        at += 1 + right
    return steps


def test_a_copy_takes_a_few_steps_where_width_is_free(row: Drafted) -> None:
    assert generate(followed(row, TEXT), row, TEXT, cost=0.0) < len(TEXT) / 3


def test_a_copy_takes_almost_a_step_a_token_where_width_costs_as_much(row: Drafted) -> None:
    assert generate(followed(row, TEXT * 4), row, TEXT * 4, cost=0.01) > len(TEXT) * 3


def test_the_tokens_that_were_right_are_counted_by_source_and_place(row: Drafted) -> None:
    speculator = followed(row, TEXT)
    generate(speculator, row, TEXT, cost=0.0)
    counts = speculator.counts[DraftSource.LOOKUP]
    assert counts.accepted == counts.tokens > len(TEXT) / 2
    assert counts.by_position[0] == counts.drafts
    assert sum(counts.by_position) == counts.accepted
    assert speculator.gain > 1


def test_a_prediction_is_told_apart(row: Drafted) -> None:
    speculator = followed(row, [1, 2, 3], Drafting(prediction=tuple(TEXT)))
    generate(speculator, row, [*TEXT[:30], 7], cost=0.0)
    counts = row.draft.take_counts()
    assert 15 < counts.predicted_accepted <= counts.predicted
    assert counts.predicted <= counts.drafted
    assert row.draft.take_counts() == DraftedCounts(), "since it was asked last"


@pytest.mark.parametrize(("most", "longest"), [(0, 0), (2, 2)])
def test_a_request_bounds_its_drafts(most: int, longest: int, row: Drafted) -> None:
    speculator = followed(row, TEXT, Drafting(most=most))
    generate(speculator, row, TEXT, cost=0.0)
    assert [bool(count) for count in speculator.counts[DraftSource.LOOKUP].by_position[:4]] == [
        at < longest for at in range(4)
    ]


def test_an_answer_is_a_draft_for_the_next_one_of_its_salt(row: Drafted) -> None:
    speculator = followed(row, [1, 2, 3, 4, 5], Drafting(salt="ours"))
    generate(speculator, row, TEXT, cost=0.0)
    assert not speculator.counts[DraftSource.HISTORY].tokens
    speculator.discard(row)
    for salt, is_found in (("theirs", False), ("ours", True)):
        speculator.add(row, np.array([9, 9, 3, 4, 5], dtype=np.int32), Drafting(salt=salt))
        before = speculator.counts[DraftSource.HISTORY].accepted
        generate(speculator, row, TEXT, cost=0.0)
        assert (speculator.counts[DraftSource.HISTORY].accepted > before) is is_found
        row.draft.followed = None


def test_drafts_that_are_wrong_become_few(row: Drafted) -> None:
    speculator = followed(row, TEXT)
    wrong = [token for at in range(60) for token in (*TEXT[3:9], 100 + at)]
    first = generate(speculator, row, wrong[:70], cost=0.004)
    assert first <= 70
    drafted = speculator.counts[DraftSource.LOOKUP].tokens
    generate(
        speculator, row, [token for at in range(60) for token in (TEXT[3 + at % 5], TEXT[9], 200 + at)], cost=0.004
    )
    assert speculator.counts[DraftSource.LOOKUP].tokens - drafted < 60


def test_a_row_whose_drafts_are_wrong_is_looked_at_ever_more_rarely_until_one_is_right(row: Drafted) -> None:
    speculator = followed(row, [1, 2, 3, 4, 5, 6, 1, 2, 3])
    looks: list[bool] = []
    for _ in range(40):
        looks.append(speculator.is_ready([row], [8]))
        if looks[-1]:
            drafts = speculator.drafts([row], [4], [8])
            speculator.verified([row], drafts, [0])
            for _ in range(2):
                speculator.costs.observe_step(1, 4, 0.0105)
    between = [later - at for at, later in pairwise(at for at, look in enumerate(looks) if look)]
    assert between[:3] == [2, 4, 8]
    assert max(between) == 16

    speculator.verified([row], speculator.drafts([row], [4], [8]), [1])
    assert any(speculator.is_ready([row], [8]) for _ in range(16))
    speculator.verified([row], speculator.drafts([row], [4], [8]), [1])
    assert speculator.is_ready([row], [8])


def test_rows_that_came_at_different_times_ask_for_drafts_at_the_same_step() -> None:
    """A block of four rows takes 2.5 plain steps: it is worth that only if most of the rows have a draft."""
    speculator = Speculator()
    for width, seconds in ((1, 0.01), (2, 0.02), (4, 0.025)):
        speculator.costs.observe_step(4, width, seconds)
    rows = [Drafted() for _ in range(4)]
    for at, each in enumerate(rows):
        speculator.add(each, np.array(TEXT * 2 + TEXT[:9], dtype=np.int32), Drafting())
        # The rows that came first have too few drafts alone, and pause.
        here, limits = rows[: at + 1], [15] * (at + 1)
        if at < 3:
            speculator.is_ready([*here, *[Drafted() for _ in range(3 - at)]], [*limits, *[0] * (3 - at)])
    assert any(speculator.is_ready(rows, [15] * 4) for _ in range(4))


class Failing:
    """A proposer that raises when it is asked, or answers with the tokens that follow in `TEXT`."""

    source = "mtp"
    longest = 7
    token_bytes = 0
    nbytes = 0
    unread = 0

    def __init__(self, *, fails: bool, error: str = "a head failed") -> None:
        self.fails = fails
        self.error = error
        self.asked = 0
        # The rows that it was asked for, and the tokens of each draft.
        self.rows: list[DraftedRow] = []
        self.count = 0
        self.has_ended = False
        # Those whose texts it has not read.
        self.reading: set[DraftedRow] = set()

    def is_reading(self, row: DraftedRow) -> bool:
        return row in self.reading

    def read(self, count: int) -> int:
        if self.fails:
            raise RuntimeError(self.error)
        self.reading.clear()
        return count

    def begin(self, draw: Draw, rows: Rows) -> None:
        pass

    def end(self) -> None:
        self.has_ended = True

    def discard(self, row: DraftedRow) -> None:
        pass

    def propose(
        self, rows: Sequence[DraftedRow], texts: Sequence[Tokens], newest: Sequence[int], count: int
    ) -> list[list[int]]:
        self.asked += 1
        self.rows, self.count = list(rows), count
        if self.fails:
            raise RuntimeError(self.error)
        return [[token + 1 + at for at in range(count)] for token in newest]


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_drafts_where_no_text_does_and_is_given_up_when_it_fails(fails: bool, row: Drafted) -> None:
    proposer = Failing(fails=fails)
    speculator = Speculator(proposer)
    speculator.add(row, np.array([1, 2, 3], dtype=np.int32), Drafting())
    plain(speculator, 0.01)
    steps = generate(speculator, row, TEXT, cost=0.0)
    assert (steps < len(TEXT) / 2) is not fails
    assert (proposer.asked == 1) is fails
    assert proposer.has_ended is fails
    assert bool(speculator.counts[DraftSource.HEAD].accepted) is not fails


@pytest.mark.parametrize("error", ["[metal::malloc] Unable to allocate 5 bytes.", "CUDA error: an illegal access"])
def test_a_failure_of_the_device_while_a_model_drafts_is_the_step_s_own(error: str, row: Drafted) -> None:
    proposer = Failing(fails=True, error=error)
    speculator = Speculator(proposer)
    speculator.add(row, np.array([1, 2, 3], dtype=np.int32), Drafting())
    plain(speculator, 0.01)
    for _ in range(2):  # nor is the model given up for it
        with pytest.raises(RuntimeError, match=r"bytes|CUDA"):
            speculator.drafts([row], [20], [8])
    assert not proposer.has_ended


def test_a_model_is_not_asked_for_a_row_that_it_reads_and_is_given_up_when_reading_fails(row: Drafted) -> None:
    proposer = Failing(fails=False)
    speculator = Speculator(proposer)
    speculator.add(row, np.array([1, 2, 3], dtype=np.int32), Drafting())
    plain(speculator, 0.01)
    proposer.reading.add(row)
    assert not speculator.is_ready([row], [8])
    assert speculator.drafts([row], [20], [8]) == [[]]
    assert (proposer.asked, speculator.read(5)) == (0, 5)
    assert speculator.is_ready([row], [8])
    assert speculator.drafts([row], [20], [8])[0][:1] == [21]
    proposer.fails = True
    assert speculator.read(5) == 0
    assert proposer.has_ended
    assert (speculator.unread, speculator.read(5)) == (0, 0)


def test_a_model_is_asked_for_the_rows_that_have_no_better_draft_and_for_no_more_than_it_can() -> None:
    proposer = Failing(fails=False)
    speculator = Speculator(proposer)
    copying, second, third = Drafted(), Drafted(), Drafted()
    for row, text in ((copying, TEXT * 3), (second, [5, 6, 7]), (third, [7, 6, 5])):
        speculator.add(row, np.array(text, dtype=np.int32), Drafting())
    for at, width in enumerate((1, 2, 4, 8, 16)):
        for _ in range(3):
            speculator.costs.observe_step(2, width, 10 + at / 10)
    speculator.drafts([second, third], [9, 9], [100, 100])
    assert proposer.rows == [second, third], "which shows what its drafts cost"
    drafts = speculator.drafts([copying, second], [TEXT[0], 9], [100, 100])
    assert (proposer.rows, proposer.count) == ([second], proposer.longest)
    assert drafts[0][:10] == TEXT[1:11]
    assert drafts[1] == list(range(10, 10 + proposer.longest))


def test_rows_that_end_before_their_text_is_indexed_hold_no_other_up() -> None:
    speculator = Speculator()
    for _ in range(100):
        row = Drafted()
        speculator.add(row, np.array(TEXT, dtype=np.int32), Drafting())
        speculator.discard(row)
    speculator.add(Drafted(), np.array(TEXT * 3, dtype=np.int32), Drafting())
    speculator.on_tick()
    assert not speculator._unindexed
