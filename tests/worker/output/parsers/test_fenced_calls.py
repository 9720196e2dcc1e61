"""A fence around calls without markers is markup; a fence around anything else is text."""

import json

import pytest

from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Case, calls_of, replay, text_of
from worker.output.parsers.families import FAMILIES

ANYWHERE = ["llama3_json", "xlam"]
AT_THE_START = ["granite", "granite3", "granite_thinking", "pythonic", "llama4_pythonic"]
CALL = '{"name": "f", "parameters": {"n": 1}}'
TOOLS = [{"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}]


def check(family: str, raw: str, content: str, calls: int) -> None:
    case = Case("", family, raw, "", "", [], TOOLS, False)
    whole = replay(case)
    assert text_of(whole[0], DeltaKind.TEXT) == content
    assert [(call.name, json.loads(call.arguments)) for call in calls_of(whole[0])] == [("f", {"n": 1})] * calls
    assert whole[1] == 0
    assert all(replay(case, [at]) == whole for at in range(1, len(raw)))
    assert replay(case, range(1, len(raw))) == whole


@pytest.mark.parametrize("family", [*ANYWHERE, *AT_THE_START])
@pytest.mark.parametrize("opening", ["```json\n", "```\n", "```JSON\n", "```json ", "```tool_call\n"])
@pytest.mark.parametrize(
    ("calls", "count"), [(CALL, 1), (f"[{CALL}]", 1), (f"[{CALL}, {CALL}]", 2), (f"{CALL}\n{CALL}", 2)]
)
def test_a_fence_around_calls_is_no_content(family: str, opening: str, calls: str, count: int) -> None:
    check(family, f"{opening}{calls}\n```", "", count)
    check(family, f"{opening}{calls}```\nDone.", "Done.", count)
    check(family, f"{opening}{calls}\n", "", count)


@pytest.mark.parametrize("family", ANYWHERE)
def test_text_around_a_fenced_call_is_kept(family: str) -> None:
    check(family, f"I look.\n```json\n{CALL}\n```\nDone `so`.", "I look.\n\nDone `so`.", 1)
    check(family, f"One:\n```json\n{CALL}\n```\nTwo:\n```\n{CALL}\n```\nDone.", "One:\n\nTwo:\n\nDone.", 2)


@pytest.mark.parametrize("family", ANYWHERE)
def test_a_fence_around_code_stays(family: str) -> None:
    check(family, '```json\n{"a": 1}\n```\n', '```json\n{"a": 1}\n```\n', 0)
    check(family, f"```python\nx = 1\n```\n{CALL}", "```python\nx = 1\n```\n", 1)
    check(family, f"```python\nx = 1\n```\n```json\n{CALL}\n```", "```python\nx = 1\n```\n", 1)


@pytest.mark.parametrize("family", ["pythonic", "llama4_pythonic"])
def test_a_fence_around_python_calls_is_no_content(family: str) -> None:
    check(family, "```python\n[f(n=1), f(n=1)]\n```\nDone.", "Done.", 2)
    check(family, "```\n[f(n=1)]\n```", "", 1)
    check(family, "```python\nf(n=1)\n```", "```python\nf(n=1)\n```", 0)


def test_a_fence_behind_a_marker_is_no_content() -> None:
    check("llama3_json", f"<|python_tag|>```json\n{CALL}\n```", "", 1)
    check("hermes", f"<tool_call>\n```json\n{CALL}\n```\n</tool_call>", "", 1)


MARKED = {
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    "glm47": "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "jamba": f"<tool_calls>[{CALL}]</tool_calls>",
    "mistral": '[TOOL_CALLS]f[ARGS]{"n": 1}',
    "lfm2_pythonic": "<|tool_call_start|>[f(n=1)]<|tool_call_end|>",
}


@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize("opening", ["```json\n", "```xml\n", "```\n"])
def test_a_fence_around_marked_calls_is_no_content(family: str, opening: str) -> None:
    call = MARKED[family]
    check(family, f"{opening}{call}\n```", "", 1)
    check(family, f"{opening}{call}", "", 1)
    check(family, f"{opening}{call}\n{call}\n```\nDone.", "Done.", 2)
    one = "One:" if FAMILIES[family].trim_before_tool else "One:\n"
    check(family, f"One:\n{opening}{call}\n```\n```python\nx\n```", f"{one}\n```python\nx\n```", 1)


@pytest.mark.parametrize("family", MARKED)
def test_a_fence_around_code_beside_a_marked_call_stays(family: str) -> None:
    before = "```python\nx = 1\n```" + ("" if FAMILIES[family].trim_before_tool else "\n")
    check(family, f"```python\nx = 1\n```\n{MARKED[family]}", before, 1)
    check(family, f"{MARKED[family]}\n```python\nx = 1\n```", "```python\nx = 1\n```", 1)
    check(family, "```xml\n<a>\n```", "```xml\n<a>\n```", 0)


def test_a_fence_around_a_broken_call_stays() -> None:
    raw = '```xml\n<tool_call>{"name": broken\n</tool_call>\n```'
    events, malformed = replay(Case("", "hermes", raw, "", "", [], TOOLS, False))
    assert (text_of(events, DeltaKind.TEXT), malformed) == (raw, 1)
