"""Calls at the end of reasoning that was never closed are calls; a call that the model only considers is reasoning."""

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Case, calls_of, replay, text_of
from worker.output.parsers.parser import make_parser

TOOLS: list[dict[str, Any]] = [
    {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}},
    {"name": "g"},
]
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
    "holo2": '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>',
    "glm47": "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
    "nemotron_v3": "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "seed_oss": "<seed:tool_call>\n<function=f>\n<parameter=n>1</parameter>\n</function>\n</seed:tool_call>",
    "jamba": '<tool_calls>[{"name": "f", "arguments": {"n": 1}}]</tool_calls>',
    "mistral": '[TOOL_CALLS]f[ARGS]{"n": 1}',
    "internlm2": '<|action_start|><|plugin|>\n{"name": "f", "parameters": {"n": 1}}<|action_end|>',
}
ENDS = {"mistral": "[/THINK]", "seed_oss": "</seed:think>"}


@dataclass(frozen=True)
class Read:
    reasoning: str
    content: str = ""
    calls: list[object] = field(default_factory=list[object])


def read(family: str, raw: str, *, tools: list[dict[str, Any]] = TOOLS, is_cut: bool = False) -> Read:
    """What the output means, the same in every split."""
    case = Case("", family, raw, "", "", [], tools, True, is_cut=is_cut)
    whole = replay(case)
    assert all(replay(case, [at]) == whole for at in range(1, len(raw)))
    assert replay(case, range(1, len(raw))) == whole
    reasoning, content = text_of(whole[0], DeltaKind.REASONING), text_of(whole[0], DeltaKind.TEXT)
    return Read(reasoning, content, [(call.name, json.loads(call.arguments)) for call in calls_of(whole[0])])


F = ("f", {"n": 1})


@pytest.mark.parametrize("family", CALLS)
def test_an_open_thought_that_ends_with_calls_makes_them(family: str) -> None:
    call = CALLS[family]
    assert read(family, f"I must look.\n{call}") == Read("I must look.", "", [F])
    assert read(family, f"I must look. {call}\n") == Read("I must look.", "", [F])
    assert read(family, f"plan\n{call}\n{call}<|im_end|>") == Read("plan", "", [F, F])
    assert read(family, call) == Read("", "", [F])


@pytest.mark.parametrize("family", CALLS)
def test_a_call_in_a_thought_that_goes_on_is_thought(family: str) -> None:
    call, end = CALLS[family], ENDS.get(family, "</think>")
    assert read(family, f"Maybe\n{call}\nor not.") == Read(f"Maybe\n{call}\nor not.")
    assert read(family, f"Maybe\n{call}\n{end}\nYes.") == Read(f"Maybe\n{call}", "Yes.")
    assert read(family, f"Maybe\n{call}\nor not.{end}{call}") == Read(f"Maybe\n{call}\nor not.", "", [F])
    assert read(family, f"Maybe\n{call}\nor not.\n{call}") == Read(f"Maybe\n{call}\nor not.", "", [F])


@pytest.mark.parametrize("family", CALLS)
def test_a_last_call_to_no_tool_or_before_a_cut_is_thought(family: str) -> None:
    call = CALLS[family]
    assert read(family, f"plan\n{call}", tools=[{"name": "g"}]) == Read(f"plan\n{call}")
    assert read(family, f"plan\n{call}", tools=[]) == Read(f"plan\n{call}")
    assert read(family, f"plan\n{call}", is_cut=True) == Read(f"plan\n{call}")


@pytest.mark.parametrize(
    "raw",
    [
        '<tool_call>{"name": "f", "arguments": {"n": 1',
        '<tool_call>{"name": "f", "arguments": {"n": 1, "n": 2}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"n" 1}}</tool_call>',
        '<tool_call>{"name": "h", "arguments": {"n": 1}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>{"name": "h", "arguments": {}}</tool_call>',
        "<tool_call>",
        "<tool_call>f(1)</tool_call>",
    ],
)
def test_a_last_call_that_is_not_whole_is_thought(raw: str) -> None:
    assert read("hermes", "plan " + raw).calls == []
    assert read("hermes", "plan " + raw + "</think>Yes.") == Read("plan " + raw, "Yes.")


@pytest.mark.parametrize("family", ["qwen3_coder", "qwen3_think"])
def test_a_last_call_within_a_line_is_a_call_of_families_whose_calls_end_reasoning_at_the_start_of_a_line(
    family: str,
) -> None:
    function = "<function=f>\n<parameter=n>\n1\n</parameter>\n</function>"
    for call in (function, CALLS["nemotron_v3"], CALLS["hermes"]):
        assert read(family, f"I must look. {call}") == Read("I must look.", "", [F])
    assert read(family, f"I write {function} or not.") == Read(f"I write {function} or not.")


def test_a_mention_does_not_hide_the_last_call() -> None:
    call = CALLS["hermes"]
    assert read("hermes", f'A <tool_call>{{"name": "f", "arguments": {{"s": "{call}') == Read(
        'A <tool_call>{"name": "f", "arguments": {"s": "', "", [F]
    )
    assert read("hermes", f"I write <tool_call> and so on, then {call}").calls == [F]


def test_a_thought_about_the_marker_is_not_held_back() -> None:
    parser = make_parser("hermes", tools=TOOLS, start_in_reasoning=True)
    assert [event.text for event in parser.feed("Write <tool_call> first")] == ["Write <tool_call> first"]
    call = CALLS["hermes"]
    assert [event.text for event in parser.feed(f"\n{call}")] == []
    assert [event.text for event in parser.feed("\nor")] == [f"\n{call}\nor"]
