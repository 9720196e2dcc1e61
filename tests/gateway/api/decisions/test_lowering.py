"""Inputs and questions of both dialects, and what is refused."""

import json
from typing import Any

import pytest

from gateway.api.decisions import openai as dialect
from gateway.api.decisions import typesafe
from gateway.api.decisions.openai import DecisionQuestion, DecisionRequest, lower_input, lower_question
from gateway.errors import ApiError, BadRequest, ModelNotFound, Unauthorized

LOW = {"label": "low"}
PREDICATE = {"type": "predicate", "instructions": "Is it so?"}


def decoded(**fields: Any) -> DecisionRequest:
    body = {"model": "m", "input": "text", "questions": [PREDICATE]} | fields
    return dialect._schema.decode(json.dumps(body).encode())[0]  # pyright: ignore[reportPrivateUsage]


def lower(**fields: Any) -> None:
    request = decoded(**fields)
    lower_input(request.input)
    for at, question in enumerate(request.questions):
        lower_question(question, f"questions[{at}]")
    dialect._cache_salt(request)  # pyright: ignore[reportPrivateUsage]


def test_every_kind_of_item_becomes_a_turn() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"}
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"role": "user", "content": [image, {"type": "input_json", "data": {"a": [1, None]}}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "seen"}]},
        {"type": "custom_tool_call", "call_id": "c2", "name": "run", "input": "ls"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "files"},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "done"}, {"type": "refusal", "refusal": "!"}],
        },
    ]
    prompt = lower_input(decoded(input=items).input)
    assert [turn["role"] for turn in prompt.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    assert prompt.thinking is False
    assert len(prompt.media) == 1
    assert prompt.messages[1]["content"][1] == {"type": "text", "text": '{"a":[1,null]}'}
    assert prompt.messages[3]["content"] == "seen"
    assert lower_input("text").messages == [{"role": "user", "content": "text"}]


DEEP: Any = {}
for _ in range(40):
    DEEP = {"in": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions"),
        ({"questions": [{"type": "predicate", "instructions": " "}]}, "questions[0].instructions"),
        ({"questions": [{"type": "guess", "instructions": "x"}]}, "questions[0].type"),
        ({"questions": [{"type": "choice", "instructions": "x"}]}, "questions[0].choices"),
        ({"questions": [{**PREDICATE, "choices": [{"value": "a"}, {"value": "b"}]}]}, "questions[0].choices"),
        ({"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}]}]}, "questions[0].choices"),
        (
            {"questions": [{"type": "choice", "instructions": "x", "choices": [{"value": "a"}] * 2}]},
            "questions[0].choices",
        ),
        (
            {"questions": [{"type": "score", "instructions": "x", "levels": [{"label": "a"}] * 2}]},
            "questions[0].levels",
        ),
        (
            {"questions": [{"type": "score", "instructions": "x", "levels": [{"label": f"{at}"} for at in range(11)]}]},
            "questions[0].levels",
        ),
        (
            {"questions": [{"type": "predicate", "instructions": [{"type": "input_image", "image_url": "u"}]}]},
            "questions[0].instructions[0]",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": DEEP}]}]}, "input[0].content[0].data"),
        ({"prompt_cache_options": {"mode": "never"}}, "prompt_cache_options.mode"),
        ({"prompt_cache_options": {"ttl": "24h"}}, "prompt_cache_options.ttl"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        lower(**fields)
    assert raised.value.param == param


def test_texts_and_booleans_of_the_same_letters_differ() -> None:
    (question,) = decoded(
        questions=[{"type": "choice", "instructions": "x", "choices": [{"value": "true"}, {"value": True}]}]
    ).questions
    lowered = lower_question(question, "q")
    assert {option.name for option in lowered.options} == {'"true"', "true"}
    answer = dialect.answer(question, [0.25, 0.75])
    assert isinstance(answer, dialect.ChoiceAnswer)
    assert answer.choice is True
    assert dialect.answer(question, None) == dialect.RefusalAnswer(None)


def test_a_key_partitions_the_cache_and_explicit_caching_needs_a_breakpoint() -> None:
    salt = dialect._cache_salt  # pyright: ignore[reportPrivateUsage]
    assert salt(decoded()) == ""
    assert salt(decoded(prompt_cache_key="k", prompt_cache_options={"mode": "implicit", "ttl": "30m"})) == "k"
    explicit = {"prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit"}}
    assert salt(decoded(**explicit)) != salt(decoded(**explicit))
    part = {"type": "input_text", "text": "t", "prompt_cache_breakpoint": {"mode": "explicit"}}
    assert salt(decoded(input=[{"role": "user", "content": [part]}], **explicit)) == "k"


def test_a_name_is_no_part_of_what_the_model_reads() -> None:
    named = DecisionQuestion("predicate", "Is it so?", name="one")
    assert lower_question(named, "q") == lower_question(DecisionQuestion("predicate", "Is it so?"), "q")


def test_systemone_takes_json_and_one_sided_criteria() -> None:
    lower = typesafe.lower_question
    noul = typesafe.SystemQuestion("noul", {"task": "x"}, {"true": ["y"]})
    assert [option.description for option in lower(noul, "q").options] == ['["y"]', ""]
    choice = typesafe.SystemQuestion("choice", None, {"a": None, "b": {"c": 1}})
    assert [option.description for option in lower(choice, "q").options] == ["", '{"c":1}']
    for bad in (
        typesafe.SystemQuestion("box", "x"),
        typesafe.SystemQuestion("noul"),
        typesafe.SystemQuestion("noul", "x", {"maybe": "y"}),
        typesafe.SystemQuestion("choice", "x", {"a": None}),
        typesafe.SystemQuestion("choice", "x", {str(at): None for at in range(256)}),
        typesafe.SystemQuestion("score", "x", {"0": "a"}),
        typesafe.SystemQuestion("score", "x", ["a", None]),
        typesafe.SystemQuestion("score", "x", [str(at) for at in range(11)]),
    ):
        with pytest.raises(BadRequest):
            lower(bad, "q")


@pytest.mark.parametrize(
    ("error", "status", "detail"),
    [
        (
            BadRequest("no", "questions.q 1.criteria[2]", "invalid_value"),
            422,
            [{"loc": ["body", "questions", "q 1", "criteria", 2], "msg": "no", "type": "invalid_value"}],
        ),
        (BadRequest("no"), 422, [{"loc": ["body"], "msg": "no", "type": "value_error"}]),
        (Unauthorized("who", None), 401, {"error_type": "authentication_error", "message": "who"}),
        (ModelNotFound("m", []), 404, None),
    ],
)
def test_errors_have_typesafes_shape(error: ApiError, status: int, detail: Any) -> None:
    body = json.loads(typesafe.typesafe_body(error))["detail"]
    assert typesafe.typesafe_status(error) == status
    assert body == detail or (detail is None and body["error_type"] == "not_found_error")
