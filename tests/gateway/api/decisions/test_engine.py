"""Labels, texts and formulas of decisions."""

import math

import pytest

from gateway.api.decisions.engine import (
    OPTIONS_MAX,
    Option,
    Question,
    QuestionKind,
    closeness_to_mode,
    expected_level,
    labels_of,
    top_probability_above_chance,
)


@pytest.mark.parametrize("count", [2, 26, 27, OPTIONS_MAX])
def test_no_label_begins_another_one(count: int) -> None:
    labels = labels_of(QuestionKind.CHOICE, count)
    assert len(set(labels)) == count
    assert len({len(label) for label in labels}) == 1
    assert labels_of(QuestionKind.SCORE, 10) == tuple("0123456789")


def test_the_order_of_the_clients_options_changes_neither_text_nor_answer() -> None:
    options = (Option("sales"), Option("billing", "invoices"), Option("other"))
    one = Question(QuestionKind.CHOICE, "Which?", options)
    other = Question(QuestionKind.CHOICE, "Which?", options[::-1])
    assert one.labelled() == other.labelled()
    assert one.labelled().text.splitlines()[1:4] == ["A. billing: invoices", "B. other", "C. sales"]
    logprobs = [-1.0, -2.0, -3.0]
    mine, theirs = one.probabilities(logprobs), other.probabilities(logprobs)
    assert mine is not None
    assert theirs is not None
    assert dict(zip(options, mine, strict=True)) == dict(zip(options[::-1], theirs, strict=True))
    assert mine[1] == max(mine)


def test_levels_keep_their_order() -> None:
    levels = tuple(Option(name) for name in ("low", "high", "average"))
    text = Question(QuestionKind.SCORE, "How much?", levels).labelled().text
    assert text.splitlines()[1:4] == ["0. low", "1. high", "2. average"]


def test_probabilities_are_shares_of_the_labels_and_none_without_a_finite_number() -> None:
    question = Question(QuestionKind.PREDICATE, "So?", (Option("Yes"), Option("No")))
    assert question.probabilities([math.log(0.03), math.log(0.01)]) == pytest.approx([0.75, 0.25])
    # Labels that are very unlikely beside other tokens still have shares.
    assert question.probabilities([-2000.0, -2000.0]) == [0.5, 0.5]
    assert question.probabilities([-1.0, math.nan]) is None
    assert question.probabilities([-math.inf, -math.inf]) is None


@pytest.mark.parametrize(
    ("probabilities", "of_choice", "of_score"),
    [
        ([1.0, 0.0, 0.0], 1.0, 1.0),
        ([1 / 3, 1 / 3, 1 / 3], 0.0, 0.0),
        ([0.5, 0.5], 0.0, 0.0),
        ([0.1, 0.1, 0.8], 0.7, 1 - 0.3 / (2 / 3)),
        ([0.5, 0.0, 0.5], 0.25, 0.0),
    ],
)
def test_confidence_is_by_the_documented_formulas(
    probabilities: list[float], of_choice: float, of_score: float
) -> None:
    assert top_probability_above_chance(probabilities) == pytest.approx(of_choice)
    assert closeness_to_mode(probabilities) == pytest.approx(of_score)


def test_a_score_is_the_expected_level() -> None:
    assert expected_level([0.1, 0.1, 0.8]) == pytest.approx(1.7)
