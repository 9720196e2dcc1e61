"""A prompt that does not fit loses whole oldest turns, or first tokens, where its request allows it, in large steps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from protocol.to_worker import ChatPrompt, Generate, Infill, Prompt, Sampling, TextPrompt, Tokenize, TokensPrompt
from tests.support.engine import spec
from tests.support.vision_models import image
from tests.support.vision_models import prompt as media_prompt
from worker.engine.row import Row
from worker.errors import RequestInvalid
from worker.prompt.infill import InfillPrompts
from worker.prompt.intake import Intake
from worker.prompt.limits_and_truncation import _least, excess, fit_tokens, turn_starts  # pyright: ignore[reportPrivateUsage]
from worker.prompt.media_prompt import EncodedPrompt
from worker.start.checked_model import load_checked

CONTEXT = 400
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def intake(model_folder: Callable[[str], Path]) -> Intake:
    return Intake(load_checked(spec(model_folder("qwen3"), context=CONTEXT, batching="together"), lambda *_: None))


def turn(number: int) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": f"question {number} " + "ka to " * 2},
        {"role": "assistant", "content": f"answer {number}"},
    ]


def chat(turns: int) -> ChatPrompt:
    messages = [SYSTEM, *(message for number in range(turns) for message in turn(number))]
    return ChatPrompt([*messages, {"role": "user", "content": "the newest"}])


def row(intake: Intake, prompt: Prompt, **fields: Any) -> Row:
    return intake.row(Generate(1, prompt, Sampling(), **fields), 0.0)


def test_oldest_turns_are_left_out_and_instructions_and_the_newest_turn_stay(intake: Intake) -> None:
    with pytest.raises(RequestInvalid) as refused:
        row(intake, chat(20), max_tokens=10)
    tokens, context = refused.value.failure.numbers
    assert context == CONTEXT < tokens
    fitted = row(intake, chat(20), max_tokens=10, truncate=-1)
    turns, truncated = fitted.truncated
    assert len(fitted.prompt) == tokens - truncated
    assert truncated >= excess(tokens, CONTEXT, 10)
    text = intake.vocabulary.decode(fitted.prompt)
    assert "Be brief." in text
    assert "the newest" in text
    assert f"question {turns} " in text
    assert f"answer {turns - 1}<" not in text
    # No more turns than it takes.
    fewer = ChatPrompt([SYSTEM, *chat(20).messages[2 * turns - 1 :]])
    assert tokens - len(row(intake, fewer).prompt) < excess(tokens, CONTEXT, 10)
    expected = ChatPrompt([SYSTEM, *chat(20).messages[1 + 2 * turns :]])
    assert fitted.prompt == row(intake, expected).prompt


def test_what_is_left_out_stays_the_same_for_several_turns(intake: Intake) -> None:
    truncated = [row(intake, chat(turns), max_tokens=10, truncate=-1).truncated[0] for turns in range(20, 40)]
    assert truncated == sorted(truncated)
    assert 2 < len(set(truncated)) <= len(truncated) // 2


def test_a_prompt_that_fits_is_left_alone(intake: Intake) -> None:
    assert row(intake, chat(3), truncate=-1).prompt == row(intake, chat(3)).prompt
    assert row(intake, chat(3), truncate=-1).truncated == (0, 0)


def test_one_turn_that_is_too_long_is_refused_all_the_same(intake: Intake) -> None:
    long = ChatPrompt([SYSTEM, *turn(1), {"role": "user", "content": "ka to mi ra " * 200}])
    with pytest.raises(RequestInvalid, match=f"maximum context length is {CONTEXT}") as refused:
        row(intake, long, truncate=-1)
    assert refused.value.failure.numbers[0] > CONTEXT


def test_a_successor_leaves_out_what_its_predecessor_has(intake: Intake) -> None:
    first = row(intake, chat(20), max_tokens=10, truncate=-1)
    goes_on = Generate(1, chat(20), Sampling(), 10, truncate=-1, truncated=first.truncated, resume=(20, 21))
    assert intake.row(goes_on, 0.0).prompt == first.prompt
    # It has less memory, and so would leave out more.
    narrow = structs.replace(goes_on, truncated=(first.truncated[0] + 2, 0))
    assert intake.row(narrow, 0.0).truncated[0] == first.truncated[0] + 2
    whole = structs.replace(goes_on, truncated=(0, 0))
    with pytest.raises(RequestInvalid, match="maximum context length"):
        intake.row(whole, 0.0)


@pytest.mark.parametrize(("truncate", "kept"), [(40, 40), (900, None), (-1, CONTEXT - CONTEXT // 4)])
def test_the_last_tokens_of_a_text_are_kept(intake: Intake, truncate: int, kept: int | None) -> None:
    ids = tuple(20 + at % 300 for at in range(CONTEXT + 50))
    if kept is None:
        with pytest.raises(RequestInvalid, match="maximum context length"):
            row(intake, TokensPrompt(ids), truncate=truncate)
        return
    fitted = row(intake, TokensPrompt(ids), truncate=truncate)
    assert fitted.prompt == list(ids[len(ids) - len(fitted.prompt) :])
    assert fitted.truncated == (0, len(ids) - len(fitted.prompt))
    assert len(fitted.prompt) == kept if truncate > 0 else kept - CONTEXT // 4 < len(fitted.prompt) <= kept
    text = TextPrompt("ka to mi ra " * 30)
    assert row(intake, text, truncate=12).prompt == row(intake, text).prompt[-12:]


@pytest.mark.parametrize(("truncate", "kept"), [(5, 5), (CONTEXT - 1, CONTEXT - 1), (-1, None)])
def test_the_last_tokens_of_a_chat_are_kept_where_its_request_cuts_tokens(
    intake: Intake, truncate: int, kept: int | None
) -> None:
    whole = intake.tokenize(Tokenize(1, chat(20), True), lambda: True)
    assert whole is not None
    fitted = row(intake, chat(20), max_tokens=10, truncate=truncate, cuts_tokens=True)
    turns, tokens = fitted.truncated
    assert (turns, fitted.prompt) == (0, list(whole.ids[tokens:]))
    assert len(fitted.prompt) == (kept or len(whole.ids) - excess(len(whole.ids), CONTEXT, 10))
    again = row(intake, chat(20), max_tokens=10, truncate=truncate, cuts_tokens=True, truncated=fitted.truncated)
    assert again.prompt == fitted.prompt
    fits = row(intake, chat(1), max_tokens=10, truncate=-1, cuts_tokens=True)
    assert fits.truncated == (0, 0)


def test_a_prompt_with_an_image_is_refused_where_tokens_of_it_would_go() -> None:
    asked = media_prompt("qwen3_vl", 1, [9, image("qwen3_vl", np.random.default_rng(3), 4, 4), 7])
    whole = EncodedPrompt(asked.ids, "", asked.media, asked.positions)
    request = Generate(1, chat(1), Sampling(), truncate=len(asked.ids), cuts_tokens=True)
    assert fit_tokens(request, whole, 0, CONTEXT) is whole
    with pytest.raises(RequestInvalid, match="one with media cannot be cut") as refused:
        fit_tokens(structs.replace(request, truncate=len(asked.ids) - 1), whole, 0, CONTEXT)
    assert refused.value.failure.param == "truncate_prompt_tokens"


def test_a_prompt_to_fill_in_the_middle_is_refused_and_never_cut(
    intake: Intake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its first tokens, which mark its parts, the model would continue another text."""

    def encode(_infill: InfillPrompts, prefix: str, _parts: Infill) -> list[int]:
        return [7, *(20 for _ in prefix), 8, 9]

    monkeypatch.setattr(InfillPrompts, "encode", encode)
    fitting = row(intake, TextPrompt("k" * 20, Infill("mi")), truncate=-1)
    assert (fitting.prompt[0], len(fitting.prompt), fitting.truncated) == (7, 23, (0, 0))
    with pytest.raises(RequestInvalid, match="maximum context length"):
        row(intake, TextPrompt("k" * (CONTEXT + 20), Infill("mi")), truncate=-1)


@given(st.integers(1, 60), st.integers(0, 70), st.integers(1, 60))
def test_the_least_count_that_is_enough_is_found_from_any_guess(most: int, least: int, guess: int) -> None:
    looks: list[int] = []

    def is_enough(count: int) -> bool:
        looks.append(count)
        return count >= least

    assert _least(is_enough, min(guess, most), most) == min(max(least, 1), most)
    assert len(looks) == len(set(looks)) <= 13
    if 1 <= least < most and guess == least:
        assert len(looks) <= 2


def test_a_turn_is_a_users_message_with_all_that_follows_it() -> None:
    roles = ["system", "developer", "assistant", "user", "assistant", "tool", "assistant", "user", "user", "system"]
    assert turn_starts([{"role": role} for role in roles]) == [2, 3, 7, 8]
    assert turn_starts([{"role": "system"}]) == []
    assert turn_starts([]) == []
