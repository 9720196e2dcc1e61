"""A written name stands for the declared tool that fits without decoration, or for itself."""

import json

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Call, Case, calls_of, replay, text_of
from worker.output.parsers.schema import declared_name


@pytest.mark.parametrize(
    ("written", "declared"),
    [
        ("functions.shell", ["shell"]),
        ("functions.shell:3", ["shell"]),
        ("functions_shell_3", ["shell", "get_weather"]),
        ("functions__shell", ["shell"]),
        ("functionsshell5", ["shell"]),
        ("tool_shell", ["shell"]),
        ("shell_12", ["shell"]),
        ("shell5", ["shell"]),
        ("shell.shell", ["shell"]),
        ("notes:shell", ["shell"]),
        ("a.b/shell", ["shell"]),
        ("mcp__notes__shell", ["shell"]),
        ("mcp__notes__shell", ["mcp__notes__shell", "shell"]),
        ("notes.shell", ["mcp__notes__shell"]),
        ("functions.mcp__notes__shell:1", ["mcp__notes__shell"]),
        ("functions_get-weather_0", ["get_weather"]),
        ("Get_Weather", ["get-weather"]),
        ("functions_shell_3", ["shell", "mcp__notes__shell"]),
    ],
)
def test_decoration_of_a_name_is_removed(written: str, declared: list[str]) -> None:
    name = written if written in declared else declared[0]
    assert declared_name(written, declared) == name


@pytest.mark.parametrize(
    ("written", "declared"),
    [
        ("call_7f3a9c", ["get_weather"]),
        ("force_delete", ["delete"]),
        ("delete", ["mcp__notes__delete"]),
        ("shells", ["shell"]),
        ("functions", ["shell"]),
        ("functions.", ["shell"]),
        ("5", ["shell"]),
        ("functionsshell5", ["shell", "shell5"]),
        ("functions_shell_1", ["shell", "shell_1"]),
        ("read", ["Read", "READ"]),
        ("step_3", ["step", "step_1"]),
        ("mcp__notes__create", ["create", "mcp__docs__create"]),
        ("shell", []),
    ],
)
def test_a_name_that_fits_no_tool_or_several_stays(written: str, declared: list[str]) -> None:
    assert declared_name(written, declared) == written


def test_a_name_of_many_parts_is_looked_up_in_bounded_time() -> None:
    assert declared_name("a." * 100_000, ["a"]) == "a." * 100_000


def tool(name: str, **types: str) -> dict[str, object]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


OUTPUTS = {
    "hermes": '<tool_call>{{"name": "{}", "arguments": {{"n": "1"}}}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function={}>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>{}<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
    "llama3_json": '{{"name": "{}", "parameters": {{"n": "1"}}}}',
    "xlam": '[{{"name": "{}", "arguments": {{"n": "1"}}}}]',
    "pythonic": "[{}(n='1')]",
    "gemma4": '<|tool_call>call:{}{{n:<|"|>1<|"|>}}<tool_call|>',
    "mistral": '[TOOL_CALLS]{}[ARGS]{{"n": "1"}}',
    "harmony": '<|channel|>commentary to={}<|message|>{{"n": "1"}}<|call|>',
    "deepseek_v31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁sep｜>{{"n": "1"}}<｜tool▁call▁end｜>',
    "kimi_k2": '<|tool_call_begin|>{}<|tool_call_argument_begin|>{{"n": "1"}}<|tool_call_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{}">\n<parameter name="n">1</parameter>\n</invoke>',
}


@pytest.mark.parametrize("family", OUTPUTS)
@pytest.mark.parametrize("written", ["functions.look_up", "notes.look_up", "Look_Up", "look_up_2"])
def test_every_family_calls_the_declared_tool_with_its_types(family: str, written: str) -> None:
    raw = OUTPUTS[family].format(written)
    case = Case("", family, raw, "", "", [], [tool("look_up", n="integer"), tool("other")], False)
    whole = replay(case)
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(whole[0])] == [("look_up", {"n": 1})]
    assert all(replay(case, [at]) == whole for at in range(1, len(raw)))


def kimi(header: str, arguments: str) -> str:
    call = f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
    return f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("raw", "call"),
    [
        (kimi("functions_f_1", '{"n": 1}'), Call("f", '{"n": 1}', "functions_f_1")),
        (kimi("call_7f3a", '{"name": "f", "arguments": {"n": "1"}}'), Call("f", '{"n": 1}', "call_7f3a")),
        (kimi("call_7f3a", '{"name": "functions.f", "n": 1}'), Call("f", '{"n": 1}', "call_7f3a")),
        (kimi("call_7f3a", '{"name": "f"}'), Call("f", "{}", "call_7f3a")),
        (kimi("call_7f3a", '{"name": "g", "n": 1}'), Call("call_7f3a", '{"name": "g", "n": 1}', "id0")),
        (kimi("call_0003", '{"n": 1}'), Call("call_0003", '{"n": 1}', "id0")),
        (kimi("call_7f3a", '{"name": "f", "n": '), Call("call_7f3a", '{"name": "f", "n": ', "id0")),
    ],
)
def test_an_id_in_place_of_a_name_is_a_call_to_the_tool_that_the_arguments_name(raw: str, call: Call) -> None:
    case = Case("", "kimi_k2", raw, "", "", [], [tool("f", n="integer")])
    whole = replay(case)
    assert calls_of(whole[0]) == [call]
    assert text_of(whole[0], DeltaKind.TEXT) == ""
    assert all(replay(case, [at]) == whole for at in range(1, len(raw)))
