"""Ollama's requests as they are lowered."""

import json
from typing import Any

import pytest

from gateway.api.ollama.request import (
    ConversationTurn,
    decode_chat,
    decode_generate,
    is_zero,
    lower_chat,
    lower_generate,
    read_context,
    read_options,
    write_context,
)
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.errors import BadRequest
from protocol.to_worker import ChatPrompt, ConstraintKind, Generate, Infill, TextPrompt

MODEL = ModelConfig(name="m", path="m", sampling=SamplingDefaults(temperature=0.6, top_k=20, max_tokens=64))
CALL = {"function": {"name": "f", "arguments": {"a": 1}}}


def lowered(**fields: Any) -> Generate:
    body = {"messages": [{"role": "user", "content": "hi"}]} | fields
    return lower_chat(decode_chat(json.dumps(body).encode())[0], MODEL, lambda: 7, 5)


def turns(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    prompt = lowered(messages=messages).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt.messages


def completed(**fields: Any) -> Generate:
    return lower_generate(decode_generate(json.dumps(fields).encode())[0], MODEL, lambda: 7, 5)


def test_options_are_sampling_and_where_they_are_silent_the_model_counts() -> None:
    options = {"top_k": -1, "top_p": 0, "min_p": 0.1, "repeat_penalty": 1.1, "num_predict": 9, "stop": ["a", ""]}
    asked, silent = lowered(options=options), lowered()

    assert (asked.sampling.top_k, asked.sampling.top_p, asked.sampling.min_p) == (0, 0, 0.1)
    assert (asked.sampling.repetition_penalty, asked.max_tokens, asked.stop) == (1.1, 9, ("a",))
    assert asked.sampling.temperature == silent.sampling.temperature == 0.6
    assert (silent.sampling.top_k, silent.sampling.top_p, silent.max_tokens) == (20, 1.0, 64)
    assert lowered(options={"num_predict": -1}).max_tokens is None
    assert lowered(options={"repeat_penalty": 2, "repeat_last_n": 0}).sampling.repetition_penalty == 1.0
    windowed = lowered(options={"repeat_penalty": 2, "repeat_last_n": 64.0, "typical_p": 0.5}).sampling
    assert (windowed.repetition_penalty, windowed.penalty_window, windowed.typical_p) == (2, 64, 0.5)


@pytest.mark.parametrize(("seed", "wanted"), [(42, 42), (42.0, 42), (0, 0), (-1.0, -1), (None, None)])
def test_a_seed_may_be_written_with_a_fraction(seed: float | None, wanted: int | None) -> None:
    assert read_options({"seed": seed})[0].wanted_seed == wanted


@pytest.mark.parametrize(
    ("think", "is_enabled", "effort"),
    [(None, None, ""), (True, True, ""), (False, False, ""), ("high", True, "high"), ("low", True, "low")],
)
def test_thinking_is_a_switch_or_an_effort(think: Any, is_enabled: bool | None, effort: str) -> None:
    prompt = lowered(think=think).prompt

    assert isinstance(prompt, ChatPrompt)
    assert (prompt.thinking, prompt.effort) == (is_enabled, effort)


def test_a_format_is_json_or_a_schema() -> None:
    assert lowered(format="").constraint is None
    loose, schema = lowered(format="json").constraint, lowered(format={"type": "object"}).constraint
    assert loose is not None
    assert schema is not None
    assert loose.kind is ConstraintKind.JSON_OBJECT
    assert (schema.kind, json.loads(schema.text)) == (ConstraintKind.JSON_SCHEMA, {"type": "object"})
    assert (schema.after_reasoning, schema.param, schema.is_strict) == (True, "format", False)


def test_results_of_tools_belong_to_the_calls_before_them_with_and_without_ids() -> None:
    said = turns(
        [
            {"role": "user", "content": "go"},
            {"role": "assistant", "tool_calls": [CALL, {"function": {"name": "g", "arguments": '{"b": 2}'}}]},
            {"role": "tool", "content": "of g", "tool_name": "g"},
            {"role": "tool", "content": "of f"},
            {"role": "assistant", "content": "so", "thinking": "hm", "tool_calls": [CALL | {"id": "mine"}]},
            {"role": "tool", "content": "of mine", "tool_call_id": "mine"},
        ]
    )

    first, second = said[1]["tool_calls"]
    assert (first["function"]["arguments"], second["function"]["arguments"]) == ({"a": 1}, {"b": 2})
    assert [(turn["tool_call_id"], turn["name"]) for turn in said if turn["role"] == "tool"] == [
        (second["id"], "g"),
        (first["id"], "f"),
        ("mine", "f"),
    ]
    assert said[4]["reasoning_content"] == "hm"


def test_images_come_before_the_text_of_their_turn() -> None:
    prompt = lowered(
        messages=[{"role": "user", "content": "What is it?", "images": ["aGk=", "data:image/png;base64,aGk="]}]
    ).prompt

    assert isinstance(prompt, ChatPrompt)
    assert [part["type"] for part in prompt.messages[0]["content"]] == ["image", "image", "text"]
    assert [media.param for media in prompt.media] == ["messages[0].images[0]", "messages[0].images[1]"]
    with pytest.raises(BadRequest, match="media belong"):
        lowered(messages=[{"role": "system", "content": "x", "images": ["aGk="]}])


def test_a_last_turn_of_the_assistant_is_the_beginning_of_the_answer() -> None:
    last = {"role": "assistant", "content": "It is"}
    prompt = lowered(messages=[{"role": "user", "content": "hi"}, last]).prompt

    assert isinstance(prompt, ChatPrompt)
    assert prompt.continue_final


def test_a_completion_is_a_chat_of_its_system_its_context_and_its_prompt() -> None:
    context = write_context(
        [ConversationTurn("system", "old"), ConversationTurn("user", "a"), ConversationTurn("assistant", "b")]
    )
    prompt = completed(prompt="c", system="new", context=context).prompt

    assert isinstance(prompt, ChatPrompt)
    assert prompt.messages == [
        {"role": "system", "content": "new"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert completed(prompt="c", raw=True).prompt == TextPrompt("c")
    assert completed(prompt="c", suffix="d").prompt == TextPrompt("c", Infill("d"))


@pytest.mark.parametrize("text", ["", "x", "ab", "abc", "é🙂", "x" * 1000])
def test_a_context_is_read_as_it_was_written(text: str) -> None:
    turns = [ConversationTurn("user", text), ConversationTurn("assistant", text)]

    assert read_context(write_context(turns)) == turns


def test_no_other_numbers_are_a_context() -> None:
    good = write_context([ConversationTurn("user", "hello")])

    for bad in (
        good[:-1],
        [*good, 0],
        [1, *good],
        [good[0], 1 << 23, *good[2:]],
        [*good[:-1], (1 << 24) - 1],
        good[:1],
    ):
        with pytest.raises(BadRequest, match="context"):
            read_context(bad)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"suffix": "x", "system": "y"}, "suffix"),
        ({"raw": True, "images": ["x"]}, "images"),
    ],
)
def test_what_would_change_the_answer_is_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(BadRequest, match=word):
        completed(prompt="x", **fields)


@pytest.mark.parametrize(
    ("field", "neutral", "others"),
    [("tool_choice", "auto", ("none", "required", {"type": "auto"})), ("parallel_tool_calls", True, (False,))],
)
def test_a_choice_among_tools_is_refused_instead_of_ignored(field: str, neutral: Any, others: tuple[Any, ...]) -> None:
    for value in others:
        with pytest.raises(BadRequest, match=field):
            lowered(**{field: value})
    assert lowered(**{field: neutral}).prompt == lowered(**{field: None}).prompt == lowered().prompt


@pytest.mark.parametrize("penalty", [0, 1e-38, 0.009, 1e7])
def test_a_repeat_penalty_that_leaves_no_numbers_is_refused(penalty: float) -> None:
    with pytest.raises(BadRequest, match="repeat_penalty"):
        lowered(options={"repeat_penalty": penalty})


@pytest.mark.parametrize("text", ["0", "-0", " 0s ", "0.0", "0.", "00", "0h0m0s", "0.00ms"])
def test_a_time_of_nothing_is_zero_in_all_its_forms(text: str) -> None:
    assert is_zero(text)


@pytest.mark.parametrize("text", ["", "5m", "-1", "0s0", "0m1s", "s", "0x"])
def test_any_other_time_is_not_zero(text: str) -> None:
    assert not is_zero(text)


def test_a_row_of_zeros_that_ends_in_something_else_is_refused_at_once() -> None:
    assert not is_zero("0" * 63 + "x"), "a search of all ways to part it would not end"


@pytest.mark.parametrize("text", ["", "a", "ab", "abc", "ü", "日本語" * 100])
def test_a_conversation_has_the_numbers_that_it_always_had(text: str) -> None:
    turns = [ConversationTurn("user", text), ConversationTurn("assistant", "x" + text)]
    data = json.dumps([["user", text], ["assistant", "x" + text]], separators=(",", ":"), ensure_ascii=False).encode()
    words = [int.from_bytes(data[at : at + 3]) for at in range(0, len(data), 3)]
    assert write_context(turns)[1:] == [len(data), *words]
    assert read_context(write_context(turns)) == turns


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"raw": True, "think": True}, ["think"]),
        ({"suffix": "b", "think": "high", "truncate": True}, ["think", "truncate"]),
        ({"top_logprobs": 2}, ["top_logprobs"]),
        ({"top_logprobs": 2, "logprobs": True, "raw": True, "think": False, "truncate": True}, []),
    ],
)
def test_fields_of_a_completion_that_have_no_effect_are_named(fields: dict[str, Any], ignored: list[str]) -> None:
    assert decode_generate(json.dumps({"prompt": "a"} | fields).encode())[1] == ignored


def test_each_result_of_many_tools_finds_its_call_without_a_look_at_all_others() -> None:
    count = 4000
    calls = [{"function": {"name": f"f{at}", "arguments": {}}, "id": f"id{at}"} for at in range(count)]
    results = [{"role": "tool", "content": "x", "tool_call_id": f"id{at}"} for at in reversed(range(count // 2))]
    results += [{"role": "tool", "content": "x", "tool_name": f"f{at}"} for at in reversed(range(count // 2, count))]
    results += [{"role": "tool", "content": "x", "tool_call_id": "none"} for _ in range(count)]
    said = turns([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}, *results])
    ids = [f"id{at}" for at in [*reversed(range(count // 2)), *reversed(range(count // 2, count))]]
    assert [turn["tool_call_id"] for turn in said if turn["role"] == "tool"] == ids + ["none"] * count
