"""Calls without the markers of their format: the whole output consists of them, or it is text."""

import json
from typing import Any, Final

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Case, calls_of, is_json, replay, some_cuts, text_of
from worker.output.parsers.call import LOOKAHEAD_LIMIT
from worker.output.parsers.families import FAMILIES
from worker.output.parsers.parser import make_parser

FORGETFUL: Final = ["hermes", "qwen3_coder", "glm47", "deepseek_v31", "kimi_k2", "mistral", "jamba", "minimax_m2"]
ARGUMENTS: Final = '{"path": "a", "body": "x</tool_call> } ``` y"}'
CALL: Final = f'{{"name": "write", "arguments": {ARGUMENTS}}}'
WRITE: Final = ("write", json.loads(ARGUMENTS))
TOOLS: Final[list[dict[str, Any]]] = [
    {"name": "write", "parameters": {"properties": {"path": {"type": "string"}, "body": {"type": "string"}}}},
    {"name": "use", "parameters": {"properties": {"tool": {"type": "string"}, "input": {"type": "string"}}}},
    {"name": "now"},
]
# Families with JSON as calls of their own without markers, of which a broken one is counted.
BARE_JSON: Final = frozenset(
    ["granite", "granite3", "granite_thinking", "llama3_json", "xlam", "functionary_v31", "llama4_pythonic", "pythonic"]
)
each_family = pytest.mark.parametrize("family", FORGETFUL)


def read(
    family: str, raw: str, tools: list[dict[str, Any]] = TOOLS, is_cut: bool = False
) -> tuple[list[tuple[str, Any]], str, int]:
    case = Case("", family, raw, "", "", [], tools, False, is_cut=is_cut)
    whole = events, malformed = replay(case)
    for at in some_cuts(raw):
        assert replay(case, [at]) == whole
    assert replay(case, range(1, len(raw))) == whole
    calls = [(call.name, json.loads(call.arguments) if is_json(call.arguments) else None) for call in calls_of(events)]
    return calls, text_of(events, DeltaKind.TEXT), malformed


FORMS: Final = [
    CALL,
    f"[{CALL}]",
    f"\n\n{CALL}\n",
    f"```json\n{CALL}\n```",
    f"```\n[{CALL}]\n```\n",
    f"write{ARGUMENTS}",
    f"write({ARGUMENTS})",
    f"functions.write{ARGUMENTS}",
    f"write\n{ARGUMENTS}",
    f"```json\nwrite({ARGUMENTS})\n```",
    f'{{"tool": "write", "args": {ARGUMENTS}}}',
    f'{{"tool_name": "write", "input": {ARGUMENTS}}}',
    f'{{"function": "write", "parameters": {ARGUMENTS}}}',
    f'{{"function": {{"name": "write", "arguments": {json.dumps(ARGUMENTS)}}}}}',
    f"{CALL}<|im_end|>",
]


@each_family
@pytest.mark.parametrize("raw", FORMS)
def test_an_output_that_is_a_call_without_markers_is_the_call(family: str, raw: str) -> None:
    assert read(family, raw) == ([WRITE], "", 0)


def test_two_calls_without_markers_are_two_calls() -> None:
    both = [WRITE, ("use", {"tool": "a"})]
    second = '{"name": "use", "arguments": {"tool": "a"}}'
    for raw in (f"{CALL}\n{second}", f"[{CALL}, {second}]", f"```json\n{CALL}\n{second}\n```"):
        assert read("hermes", raw) == (both, "", 0)


@pytest.mark.parametrize("second", ["", '\n{"name": "use", "arguments": {"tool": "a"}}\n</tool_call>'])
def test_a_call_with_its_end_marker_alone_is_a_call(second: str) -> None:
    calls, content, malformed = read("hermes", f"{CALL}\n</tool_call>{second}")
    assert (calls, content, malformed) == ([WRITE, *([("use", {"tool": "a"})] if second else [])], "", 0)


@each_family
@pytest.mark.parametrize("raw", FORMS[:-1])
def test_a_call_beside_other_text_is_text(family: str, raw: str) -> None:
    for text in (f"So:\n{raw}", f"{raw}\nThat is the call.", f"{raw}, or so"):
        calls, content, malformed = read(family, text)
        assert (calls, content.strip(), malformed) == ([], text.strip(), 0)


@pytest.mark.parametrize(
    "raw",
    [
        CALL.replace("write", "Bob"),
        CALL.replace('"path"', '"type"'),
        f'{{"name": "write", "note": "{"x" * 600}", "arguments": {ARGUMENTS}}}',
        CALL[:-2],
        "write",
        "write {",
        "[]",
        "{}",
        '{"name": "write"}',
        f"Bob{ARGUMENTS}",
    ],
)
def test_anything_else_than_a_whole_call_of_a_declared_tool_with_declared_arguments_is_text(raw: str) -> None:
    calls, content, malformed = read("hermes", raw)
    assert (calls, content.strip()) == ([], raw)
    assert malformed == (raw in (CALL[:-2], "write {"))


def test_a_call_without_markers_needs_declared_tools_and_an_output_that_is_not_cut() -> None:
    assert read("hermes", CALL, []) == ([], CALL, 0)
    assert read("hermes", CALL, is_cut=True) == ([], CALL, 0)


def held(family: str, raw: str) -> int:
    """The most characters that are held back."""
    parser, most, shown = make_parser(family, tools=TOOLS, start_in_reasoning=False), 0, 0
    for at, char in enumerate(raw):
        shown += sum(len(event.text) for event in parser.feed(char))
        most = max(most, at + 1 - shown)
    return most


@each_family
def test_an_answer_that_is_no_call_is_not_held_back(family: str) -> None:
    assert held(family, "Right, the weather is fine.") <= 2
    assert held(family, "written by me") <= 5
    assert held(family, '{"answer": [1, 2, 3], "name": "write"}') <= len('{"answer":')
    assert held(family, '{"name": "Bob", "age": 5}') <= len('{"name": "Bob",')
    assert held(family, "```python\nprint(1)\n```") <= len("```python\np")
    assert held(family, '{"name": "' + "x" * 3000) <= LOOKAHEAD_LIMIT + 3
    assert held(family, '{"arguments": {"a": "' + "x y " * 900) <= LOOKAHEAD_LIMIT + 3


def test_names_of_fields_are_arguments_where_they_are_declared() -> None:
    raw = '<tool_call>{"name": "use", "tool": "hammer", "input": "nail"}</tool_call>'
    assert read("hermes", raw) == ([("use", {"tool": "hammer", "input": "nail"})], "", 0)


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - BARE_JSON))
def test_ordinary_answers_of_all_families_stay_text(family: str) -> None:
    for raw in ("Done: `write{}` it.", '{"name": "Ann"}', "```json\n[1, 2]\n```", "now", "```\nx\n```\n```\ny\n```"):
        calls, content, malformed = read(family, raw)
        assert (calls, content.strip(), malformed) == ([], raw, 0), raw
