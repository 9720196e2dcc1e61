import json
from typing import Any

import pytest

from gateway.api.responses.lowering import lower_prompt, lower_responses, seal
from gateway.api.responses.request import ResponsesRequest, ToolIdentity, decode_responses, toolbox
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest
from protocol.to_worker import ChatPrompt, ConstraintKind, Generate

MODEL = ModelConfig(name="m", path="m")


def request(**fields: Any) -> ResponsesRequest:
    return decode_responses(json.dumps({"model": "m", "input": "hi"} | fields).encode())[0]


def prompt(**fields: Any) -> ChatPrompt:
    body = request(**fields)
    return lower_prompt(body, toolbox(body), [])[0]


def generate(**fields: Any) -> Generate:
    return lower_responses(request(**fields), prompt(**fields), MODEL, lambda: 1, 7)


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        generate(**fields)
    return caught.value


# -- items -----------------------------------------------------------------------------------------------------------


def test_a_plain_string_is_a_user_turn() -> None:
    assert prompt(input="hi").messages == [{"role": "user", "content": "hi"}]


def test_instructions_come_first_and_developers_are_the_system() -> None:
    found = prompt(
        instructions="Be brief.",
        input=[
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "a"}], "id": "x"},
            {"role": "system", "content": "b"},
            {"role": "user", "content": [{"type": "input_text", "text": "c"}, {"type": "input_text", "text": "d"}]},
        ],
    )

    assert [(m["role"], m["content"]) for m in found.messages] == [
        ("system", "Be brief."),
        ("system", "a"),
        ("system", "b"),
        ("user", "c\n\nd"),
    ]


def test_a_turn_of_codex_is_one_turn_of_the_assistant_and_its_results() -> None:
    found = prompt(
        input=[
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "list"}]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
                "encrypted_content": None,
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "name": "sh", "arguments": '{"cmd":"ls"}', "call_id": "c1"},
            {"type": "custom_tool_call", "name": "apply_patch", "input": '*** "x"', "call_id": "c2"},
            {"type": "function_call", "name": "spawn", "namespace": "ns", "arguments": "", "call_id": "c3"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.txt"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "Done"}]},
            {"type": "function_call_output", "call_id": "c3", "output": "ok"},
        ]
    )

    user, assistant, *results = found.messages
    assert user["content"] == "list"
    assert (assistant["content"], assistant["reasoning_content"]) == ("I look.", "hm")
    assert [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in assistant["tool_calls"]] == [
        ("c1", "sh", {"cmd": "ls"}),
        ("c2", "apply_patch", {"input": '*** "x"'}),
        ("c3", "ns__spawn", {}),
    ]
    assert [(r["tool_call_id"], r["name"], r["content"]) for r in results] == [
        ("c1", "sh", "a.txt"),
        ("c2", "apply_patch", "Done"),
        ("c3", "ns__spawn", "ok"),
    ]


@pytest.mark.parametrize(
    ("sent", "read"),
    [
        ({"content": [{"type": "reasoning_text", "text": "full"}]}, "full"),
        ({"content": "plain"}, "plain"),
        ({"encrypted_content": seal("sealed é")}, "sealed é"),
        ({"encrypted_content": "gAAAAABo", "summary": [{"type": "summary_text", "text": "sum"}]}, "sum"),
        ({"encrypted_content": "mlxd1.%%%"}, None),
        ({"encrypted_content": "gAAAAABo"}, None),
    ],
)
def test_reasoning_comes_back_in_full_sealed_or_as_its_summary(sent: dict[str, Any], read: str | None) -> None:
    items = [{"type": "reasoning", "summary": []} | sent, {"role": "assistant", "content": "x"}]

    assert prompt(input=items).messages[0].get("reasoning_content") == read


def test_what_servers_of_others_did_is_left_out_and_named() -> None:
    body = request(input=[{"type": "web_search_call", "id": "ws"}, {"role": "user", "content": "x"}])
    found, ignored = lower_prompt(body, toolbox(body), [])

    assert len(found.messages) == 1
    assert ignored == ["input.web_search_call"]


def test_a_compaction_of_ours_is_a_summary_and_of_others_nothing() -> None:
    items = [
        {"type": "compaction", "encrypted_content": "gAAAAABo"},
        {"type": "compaction", "encrypted_content": seal("Alice asked.")},
    ]
    body = request(input=items)
    found, ignored = lower_prompt(body, toolbox(body), [])

    assert [turn["content"] for turn in found.messages] == ["Summary of the conversation so far:\nAlice asked."]
    assert ignored == ["input.compaction"]


@pytest.mark.parametrize(
    ("item", "word"),
    [
        ({"type": "hologram"}, "hologram"),
        ({"type": "message", "role": "critic", "content": "x"}, "critic"),
        ({"type": "message", "role": "user"}, "content"),
        ({"type": "message", "content": "x"}, "role"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "image_url"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]}, "no uploaded files"),
        ({"role": "user", "content": [{"type": "input_file", "filename": "a.pdf"}]}, "file_data"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]}, "no uploaded files"),
        ({"role": "user", "content": [{"type": "input_file", "file_data": "x", "file_url": "http://x"}]}, "Only one"),
        ({"role": "assistant", "content": [{"type": "input_file", "file_data": "x"}]}, "media belong"),
        ({"role": "assistant", "content": [{"type": "input_image", "image_url": "data:"}]}, "media belong"),
        ({"role": "user", "content": [{"type": "smell"}]}, "smell"),
        ({"type": "function_call_output", "output": "x"}, "call_id"),
        ({"type": "function_call", "call_id": "c"}, "name"),
        ({"type": "item_reference", "id": "msg_1"}, "msg_1"),
        ({"id": "msg_1"}, "msg_1"),
    ],
)
def test_an_item_that_cannot_be_shown_is_refused_by_name(item: dict[str, Any], word: str) -> None:
    error = refused(input=[{"role": "user", "content": "x"}, item])

    assert error.status == 400
    assert word in error.message
    assert (error.param or "").startswith("input[1]")


@pytest.mark.parametrize("nothing", [None, []])
def test_nothing_to_answer_is_refused(nothing: Any) -> None:
    assert refused(input=nothing).param == "input"


# -- tools -----------------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}


def test_custom_and_namespace_tools_are_shown_as_functions() -> None:
    body = request(
        tools=[
            FUNCTION,
            {
                "type": "custom",
                "name": "apply_patch",
                "description": "Patch.",
                "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
            },
            {"type": "namespace", "name": "ns", "description": "d", "tools": [{"type": "function", "name": "g"}]},
            {"type": "web_search", "search_context_size": "low"},
            {"type": "mcp", "server_label": "x"},
        ]
    )
    box = toolbox(body)
    found = lower_prompt(body, box, [])[0]

    assert [tool["function"]["name"] for tool in found.tools] == ["f", "apply_patch", "ns__g"]
    custom = found.tools[1]["function"]
    assert custom["description"].startswith("Patch.")
    assert "start: x" in custom["description"]
    assert custom["parameters"]["required"] == ["input"]
    assert found.strict_tools == ("f",)
    assert box.forms == {
        "f": ToolIdentity("f"),
        "apply_patch": ToolIdentity("apply_patch", is_custom=True),
        "ns__g": ToolIdentity("g", "ns"),
    }
    assert box.ignored == ["tools.custom.format", "tools.web_search", "tools.mcp"]
    assert [tool.get("strict") for tool in box.echo] == [True, None, None, None, None]
    assert box.echo[3] == {"type": "web_search", "search_context_size": "low"}


@pytest.mark.parametrize("arguments", [{"city": "Bern"}, '{"city": "Bern"}'])
def test_arguments_of_an_earlier_call_are_text_or_an_object(arguments: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    [turn] = prompt(input=[call]).messages

    assert turn["tool_calls"][0]["function"]["arguments"] == {"city": "Bern"}


@pytest.mark.parametrize(
    ("choice", "must", "callable_tools", "shown"),
    [
        ("auto", False, (), ["f", "p", "ns__g"]),
        ("none", False, (), []),
        ("required", True, (), ["f", "p", "ns__g"]),
        ({"type": "auto"}, False, (), ["f", "p", "ns__g"]),
        ({"type": "none"}, False, (), []),
        ({"type": "required"}, True, (), ["f", "p", "ns__g"]),
        ({"type": "function", "name": "f"}, True, ("f",), ["f", "p", "ns__g"]),
        ({"type": "custom", "name": "p"}, True, ("p",), ["f", "p", "ns__g"]),
        ({"type": "function", "name": "g", "namespace": "ns"}, True, ("ns__g",), ["f", "p", "ns__g"]),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]},
            True,
            (),
            ["f"],
        ),
        # The same in the forms of Chat Completions, which clients of both send.
        ({"type": "any"}, True, (), ["f", "p", "ns__g"]),
        ("any", True, (), ["f", "p", "ns__g"]),
        ({"type": "function", "function": {"name": "f"}}, True, ("f",), ["f", "p", "ns__g"]),
        ({"type": "custom", "custom": {"name": "p"}}, True, ("p",), ["f", "p", "ns__g"]),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "f"}}]}}, True, (), ["f"]),
        # A tool that is left out of the request's tools is left out of the allowed ones.
        ({"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}]},
         False, (), ["f"]),
    ],
)  # fmt: skip
def test_every_choice_among_tools(choice: Any, must: bool, callable_tools: tuple[str, ...], shown: list[str]) -> None:
    namespace = {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}]}
    found = prompt(tools=[FUNCTION, {"type": "custom", "name": "p"}, namespace], tool_choice=choice)

    assert (found.must_call, found.callable_tools) == (must, callable_tools)
    assert [tool["function"]["name"] for tool in found.tools] == shown


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "teleport"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": 3}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tools": [FUNCTION], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}},
         "tool_choice.tools"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function"}]}},
         "tool_choice.tools[0].name"),
    ],
)  # fmt: skip
def test_impossible_tools_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


# -- the rest --------------------------------------------------------------------------------------------------------


def test_a_schema_becomes_a_constraint_after_the_reasoning() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    wanted = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "low"}
    constraint = generate(text=wanted).constraint

    assert constraint is not None
    assert constraint.kind is ConstraintKind.JSON_SCHEMA
    assert json.loads(constraint.text) == schema
    assert constraint.after_reasoning
    assert constraint.is_strict
    assert generate(text={"format": {"type": "text"}}).constraint is None
    json_object = generate(text={"format": {"type": "json_object"}}).constraint
    assert json_object is not None
    assert json_object.kind is ConstraintKind.JSON_OBJECT


def test_a_schema_is_enforced_whatever_the_type_beside_it() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    found = [
        generate(text={"format": {"type": kind, "name": "x", "schema": schema}}).constraint
        for kind in ("json_object", "json_schema")
    ]
    assert [each and (each.kind, json.loads(each.text)) for each in found] == [(ConstraintKind.JSON_SCHEMA, schema)] * 2


@pytest.mark.parametrize("wanted", [{"type": "poem"}, {"type": "json_schema", "name": "x"}])
def test_a_format_that_is_none_is_refused_in_this_apis_words(wanted: dict[str, Any]) -> None:
    error = refused(text={"format": wanted})

    assert (error.param or "").startswith("text.format")
    assert "response_format" not in error.message


def test_numbers_and_effort_are_lowered() -> None:
    found = generate(
        max_output_tokens=9, temperature=0.5, top_p=0.25, top_logprobs=2, reasoning={"effort": "low"}, stream=True
    )

    assert (found.max_tokens, found.sampling.temperature, found.sampling.top_p) == (9, 0.5, 0.25)
    assert (found.top_logprobs, found.want_progress) == (2, True)
    assert isinstance(found.prompt, ChatPrompt)
    assert (found.prompt.thinking, found.prompt.effort) == (True, "low")
    assert generate(include=["message.output_text.logprobs"]).top_logprobs == 0
    assert generate().top_logprobs is None


def test_thinking_is_also_controlled_as_on_chat() -> None:
    found = generate(thinking_budget=7, chat_template_kwargs={"enable_thinking": False, "tone": "dry"})

    assert found.thinking_budget == 7
    assert isinstance(found.prompt, ChatPrompt)
    assert (found.prompt.thinking, found.prompt.template_kwargs["tone"]) == (False, "dry")
    assert refused(chat_template_kwargs={"messages": []}).param == "chat_template_kwargs"


def test_what_does_nothing_here_is_named_or_tolerated() -> None:
    body = {"model": "m", "input": "x", "truncation": "auto", "zap": 1, "client_metadata": {}, "max_tool_calls": 2}

    assert decode_responses(json.dumps(body).encode())[1] == ["zap"]


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True, "store": False},
        {"conversation": "conv_1"},
        {"prompt": {"id": "p"}},
        {"truncation": "middle"},
        {"temperature": 3},
        {"repetition_penalty": 0.009},
        {"reasoning": {"effort": "galactic"}},
        {"max_output_tokens": 0},
        {"input": 7},
    ],
)
def test_what_cannot_be_served_is_refused(fields: dict[str, Any]) -> None:
    assert refused(**fields).status == 400
