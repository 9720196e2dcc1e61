"""Tokenize calls: bounded, answered in order, forgotten when nobody waits, and never in the way."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from protocol.failures import Code
from protocol.from_worker import Rejected, Tokenized, Up
from protocol.to_worker import ChatPrompt, Detokenize, Prompt, TextPrompt, Tokenize, TokensPrompt
from tests.support.engine import TIMEOUT_S, spec
from tests.support.scale import patient
from worker.engine.gauges import Gauges
from worker.errors import RequestInvalid
from worker.model.loader import load
from worker.prompt.intake import Intake
from worker.prompt.tokenize_calls import MAX_WAITING_CALLS, TokenizeCalls

CONTEXT = 64
CHARS_MAX = 4 * 8 * CONTEXT
IDS_MAX = 4 * CONTEXT


@pytest.fixture(scope="module")
def intake(model_folder: Callable[[str], Path]) -> Intake:
    return Intake(load(spec(model_folder("qwen3"), context=CONTEXT), lambda *_: None))


class Desk:
    """`TokenizeCalls` and what they answer."""

    def __init__(self, intake: Intake) -> None:
        self.sent: SimpleQueue[Up] = SimpleQueue()
        self.gauges = Gauges()
        self.tokenize_calls = TokenizeCalls(intake, self.sent.put, self._refusing, self.gauges)

    @contextmanager
    def _refusing(self, rid: int) -> Generator[None]:
        try:
            yield
        except RequestInvalid as error:
            self.sent.put(Rejected(rid, error.failure))

    def answers(self, count: int) -> list[Up]:
        return [self.sent.get(timeout=patient(TIMEOUT_S)) for _ in range(count)]


def ask(intake: Intake, prompt: Prompt, *, want_ids: bool = False) -> Tokenized:
    answer = intake.tokenize(Tokenize(1, prompt, want_ids), lambda: True)
    assert answer is not None
    return answer


@pytest.mark.parametrize("text", ["kato", "kato mira " * 200])
def test_a_text_need_not_fit_to_be_counted(intake: Intake, text: str) -> None:
    answer = ask(intake, TextPrompt(text), want_ids=True)
    assert answer.count == len(answer.ids) == ask(intake, TextPrompt(text)).count
    assert intake.vocabulary.decode(answer.ids) == text


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (TextPrompt("a" * (CHARS_MAX + 1)), "prompt"),
        (ChatPrompt([{"role": "user", "content": "a" * CHARS_MAX}]), "messages"),
        (TokensPrompt((20,) * (IDS_MAX + 1)), "prompt"),
    ],
)
def test_more_than_a_few_contexts_is_not_counted(intake: Intake, prompt: Prompt, param: str) -> None:
    with pytest.raises(RequestInvalid) as refused:
        ask(intake, prompt)
    assert (refused.value.failure.code, refused.value.failure.param) == (Code.INVALID_REQUEST, param)
    assert "at most" in refused.value.failure.message


def test_more_ids_than_a_few_contexts_are_not_decoded(intake: Intake) -> None:
    answer = intake.tokenize(Detokenize(1, (20,) * IDS_MAX), lambda: True)
    assert answer is not None
    assert answer.count == IDS_MAX
    with pytest.raises(RequestInvalid, match=f"at most {IDS_MAX}"):
        intake.tokenize(Detokenize(1, (20,) * (IDS_MAX + 1)), lambda: True)


def test_counting_ends_at_the_next_slice_when_its_client_leaves(model_folder: Callable[[str], Path]) -> None:
    # Room for enough text to be cut.
    intake = Intake(load(spec(model_folder("qwen3")), lambda *_: None))
    text = "kato mira " * 13_000
    looks: list[int] = []

    def is_wanted() -> bool:
        looks.append(1)
        return len(looks) < 2

    assert intake.tokenize(Tokenize(1, TextPrompt(text)), is_wanted) is None
    assert len(looks) == 2


def test_a_tokenize_call_beyond_the_limit_is_refused_and_the_others_are_answered_in_order(
    intake: Intake,
) -> None:
    desk = Desk(intake)
    for rid in range(MAX_WAITING_CALLS + 1):
        desk.tokenize_calls.put(Tokenize(rid, TextPrompt("kato")))
    (refused,) = desk.answers(1)
    assert isinstance(refused, Rejected)
    assert (refused.rid, refused.failure.code) == (MAX_WAITING_CALLS, Code.BUSY)
    assert desk.gauges.refused_tokenize_calls == 1
    desk.tokenize_calls.start()
    answers = desk.answers(MAX_WAITING_CALLS)
    assert [answer.rid for answer in answers if isinstance(answer, Tokenized)] == list(range(MAX_WAITING_CALLS))


def test_a_tokenize_call_that_was_aborted_is_never_answered(intake: Intake) -> None:
    desk = Desk(intake)
    for rid in (1, 2, 3):
        desk.tokenize_calls.put(Tokenize(rid, TextPrompt("kato")))
    assert desk.tokenize_calls.abort((2, 77)) == [77]
    desk.tokenize_calls.start()
    answers = desk.answers(2)
    assert [answer.rid for answer in answers if isinstance(answer, Tokenized)] == [1, 3]


def test_a_tokenize_call_that_cannot_be_answered_is_refused_and_the_next_one_is_answered(intake: Intake) -> None:
    desk = Desk(intake)
    desk.tokenize_calls.start()
    desk.tokenize_calls.put(Detokenize(1, (10**9,)))
    desk.tokenize_calls.put(Detokenize(2, ()))
    first, second = desk.answers(2)
    assert isinstance(first, Rejected)
    assert second == Tokenized(2, 0)
