"""One model in four dialects: the same text, streamed and whole, with seeds, stop strings and predictions."""

from typing import Any

import pytest

from tests.real.dialects import CHAT, DIALECTS
from tests.real.documents import page
from tests.real.figures import Figures
from tests.real.prepare import SMOLLM2
from tests.real.serving import Served

pytestmark = pytest.mark.soak
MODELS = {"m": f'path = "{SMOLLM2}"'}
PROMPT = "Name three fruits and say of each what it tastes like."
STOPS = ["2.", "\n\n"]
each_dialect = pytest.mark.parametrize("dialect", DIALECTS)


@pytest.fixture(scope="module")
def greedy(served: Served) -> str:
    return CHAT.whole(served, "m", PROMPT)


@each_dialect
def test_the_whole_answer_is_the_same_in_each_dialect(served: Served, greedy: str, dialect: str) -> None:
    assert len(greedy) > 80
    assert DIALECTS[dialect].whole(served, "m", PROMPT) == greedy


@each_dialect
def test_the_streamed_answer_is_the_whole_one(served: Served, greedy: str, dialect: str) -> None:
    assert DIALECTS[dialect].streamed(served, "m", PROMPT) == greedy


@each_dialect
def test_a_seed_repeats_a_sampled_answer(served: Served, dialect: str) -> None:
    first, again = (DIALECTS[dialect].whole(served, "m", PROMPT, 24, temperature=1.0, seed=7) for _ in range(2))

    assert first == again == CHAT.whole(served, "m", PROMPT, 24, temperature=1.0, seed=7)
    assert first != DIALECTS[dialect].whole(served, "m", PROMPT, 24, temperature=1.0, seed=8)


# The Responses API has no stop strings.
@pytest.mark.parametrize("dialect", [name for name in DIALECTS if name != "responses"])
def test_the_first_stop_string_ends_the_answer_before_it(served: Served, greedy: str, dialect: str) -> None:
    end = min(at for stop in STOPS if (at := greedy.find(stop)) >= 0)

    assert DIALECTS[dialect].whole(served, "m", PROMPT, stop=STOPS) == greedy[:end]
    assert DIALECTS[dialect].streamed(served, "m", PROMPT, stop=STOPS) == greedy[:end]


def test_one_choice_is_the_first_of_three(served: Served) -> None:
    sampled = {"temperature": 1.0, "seed": 3}
    one, three = (CHAT.ask(served, "m", PROMPT, 16, n=n, **sampled)["choices"] for n in (1, 3))

    assert one[0]["message"] == three[0]["message"]
    assert len({choice["message"]["content"] for choice in three}) > 1


def test_thinking_off_changes_nothing_for_a_template_without_it(served: Served, greedy: str) -> None:
    off: list[dict[str, Any]] = [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}]

    assert {CHAT.whole(served, "m", PROMPT, **each) for each in off} == {greedy}


def test_all_dialects_count_the_same_tokens(served: Served) -> None:
    answers = {name: dialect.ask(served, "m", PROMPT, 12) for name, dialect in DIALECTS.items()}
    usage = {name: answer.get("usage", {}) for name, answer in answers.items()}
    # Anthropic counts what was cached apart.
    anthropic, ollama = usage["anthropic"], answers["ollama"]
    counts = {
        (usage["chat"]["prompt_tokens"], usage["chat"]["completion_tokens"]),
        (usage["responses"]["input_tokens"], usage["responses"]["output_tokens"]),
        (anthropic["input_tokens"] + anthropic.get("cache_read_input_tokens", 0), anthropic["output_tokens"]),
        (ollama["prompt_eval_count"], ollama["eval_count"]),
    }

    assert len(counts) == 1, counts


def test_a_prediction_is_tried_where_the_prompt_has_the_same_text(served: Served, figures: Figures) -> None:
    text = page("memory", 500)
    prompt = f"Repeat this text word for word:\n\n{text}"
    body = {"prediction": {"type": "content", "content": text}}
    # Each with a salt of its own: an answer that is cached would be drafted before anything else.
    plain = CHAT.ask(served, "m", prompt, 64, cache_salt="plain")
    predicted = CHAT.ask(served, "m", prompt, 64, cache_salt="predicted", **body)

    details = predicted["usage"]["completion_tokens_details"]
    figures.note("accepted `prediction`", f"{details['accepted_prediction_tokens']} of 64 tokens")
    assert predicted["choices"][0]["message"] == plain["choices"][0]["message"]
    assert details["accepted_prediction_tokens"] > 0
