"""Tools in OpenAI's words: what reaches the engine, what is refused, and how calls and results come back."""

import json
from itertools import count
from typing import Any

import pytest

from gateway.api.openai.lowering import lower_chat
from gateway.api.openai.request import decode_chat
from gateway.config.settings import ModelConfig
from gateway.errors import ApiError
from protocol.codec import decode_down, encode
from protocol.to_worker import ChatPrompt, Generate

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Tell the weather.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now", "strict": True}}]


def generate(**fields: Any) -> Generate:
    request, unknown = decode_chat(json.dumps({"model": "m", "messages": HI} | fields).encode())
    assert not unknown
    [found] = lower_chat(request, ModelConfig(name="m", path="m"), count(1).__next__, 7)
    assert decode_down(encode(found)) == found
    return found


def prompt(**fields: Any) -> ChatPrompt:
    found = generate(**fields).prompt
    assert isinstance(found, ChatPrompt)
    return found


def names(found: ChatPrompt) -> list[str]:
    return [tool["function"]["name"] for tool in found.tools]


def test_tools_reach_the_template_in_openais_shape() -> None:
    found = prompt(tools=TOOLS)

    assert found.tools[0] == {"type": "function", "function": WEATHER}
    assert found.tools[1]["function"] == {
        "name": "now",
        "description": "",
        "parameters": {"type": "object", "properties": {}},
    }
    assert found.strict_tools == ("now",)
    assert not found.must_call
    assert not found.one_call


@pytest.mark.parametrize(
    ("fields", "shown", "must_call", "callable_tools", "one_call"),
    [
        ({}, ["weather", "now"], False, (), False),
        ({"tool_choice": "auto"}, ["weather", "now"], False, (), False),
        ({"tool_choice": "none"}, [], False, (), False),
        ({"tool_choice": "required"}, ["weather", "now"], True, (), False),
        ({"tool_choice": "any"}, ["weather", "now"], True, (), False),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["weather", "now"], True, (), True),
        ({"parallel_tool_calls": False}, ["weather", "now"], False, (), True),
        ({"tool_choice": {"type": "auto"}}, ["weather", "now"], False, (), False),
        ({"tool_choice": {"type": "none"}}, [], False, (), False),
        ({"tool_choice": {"type": "required"}, "parallel_tool_calls": False}, ["weather", "now"], True, (), True),
        ({"tool_choice": {"type": "any"}}, ["weather", "now"], True, (), False),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, ["weather", "now"], True, ("now",), True),
        ({"tool_choice": {"type": "function", "name": "now"}}, ["weather", "now"], True, ("now",), True),
        (
            {"tool_choice": {"type": "allowed_tools",
                             "allowed_tools": {"mode": "required", "tools": [TOOLS[1]]}}},
            ["now"], True, (), False,
        ),
        # The same in the form of the Responses API, which clients of both send.
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required",
                             "tools": [{"type": "function", "name": "now"}]}},
            ["now"], True, (), False,
        ),
    ],
)  # fmt: skip
def test_each_choice_means_one_thing(
    fields: dict[str, Any], shown: list[str], must_call: bool, callable_tools: tuple[str, ...], one_call: bool
) -> None:
    found = prompt(tools=TOOLS, **fields)

    assert names(found) == shown
    assert (found.must_call, found.callable_tools, found.one_call) == (must_call, callable_tools, one_call)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": 10**30}}}]},
         "tools[0].function.parameters"),
        ({"tools": "all"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": 5, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": {"type": "zzz"}, "tools": TOOLS}, "tool_choice.type"),
        ({"tool_choice": {"type": "tool", "name": "now"}, "tools": TOOLS}, "tool_choice.type"),
        ({"tool_choice": {"type": "required"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": TOOLS}, "tool_choice.allowed_tools"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "x"}]},
          "tools": TOOLS}, "tool_choice.allowed_tools.tools"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"tools": [{"type": "function", "name": "x"}]}},
          "tools": TOOLS}, "tool_choice.allowed_tools.tools"),
        ({"functions": [WEATHER], "tools": TOOLS}, "functions"),
        ({"functions": [{}]}, "functions[0].name"),
        ({"function_call": {"name": "x"}}, "function_call"),
        ({"functions": [WEATHER], "function_call": {"name": "x"}}, "function_call"),
        ({"functions": [WEATHER], "function_call": "always"}, "function_call"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}]},
         "messages[0].tool_calls[0].function.name"),
        ({"messages": [{"role": "tool", "tool_call_id": "c", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].image_url"),
    ],
)  # fmt: skip
def test_bad_shapes_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        generate(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param


def test_calls_and_results_of_earlier_turns_are_what_templates_expect() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    found = prompt(
        tools=TOOLS,
        messages=[
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
            {"role": "tool", "tool_call_id": "cut off", "content": "?"},
        ],
    )

    assert found.messages[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
            ],
            "reasoning_content": "hm",
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain", "name": "weather"},
        {"role": "tool", "tool_call_id": "cut off", "content": "?"},
    ]


def test_a_refusal_of_an_earlier_turn_is_its_text() -> None:
    refusing = {"role": "assistant", "content": None, "refusal": "I cannot."}
    parted = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}

    said = prompt(messages=[*HI, refusing, *HI, parted, *HI]).messages
    assert [said[1]["content"], said[3]["content"]] == ["I cannot.", "No."]


def test_functions_of_old_are_tools_with_one_call() -> None:
    found = prompt(
        functions=[WEATHER],
        function_call={"name": "weather"},
        messages=[
            *HI,
            {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": "{}"}},
            {"role": "function", "name": "weather", "content": "rain"},
        ],
    )

    assert names(found) == ["weather"]
    assert (found.must_call, found.callable_tools, found.one_call) == (True, ("weather",), True)
    [call] = found.messages[1]["tool_calls"]
    assert found.messages[2] == {"role": "tool", "tool_call_id": call["id"], "content": "rain", "name": "weather"}


def test_arguments_that_were_once_broken_do_not_break_the_next_turn() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Os'}}
    found = prompt(messages=[*HI, {"role": "assistant", "tool_calls": [call]}])

    assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == {"arguments": '{"city": "Os'}
