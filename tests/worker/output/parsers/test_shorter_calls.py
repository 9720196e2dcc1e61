"""Outputs that lack a part of a call: no complete call has fewer arguments than the model began, or other ones."""

import json
from typing import Any, Final

import pytest

from tests.support.scale import scaled
from tests.worker.output.parsers.replay import Case, calls_of, is_json, load_cases, replay
from tests.worker.output.parsers.tagged_calls import TAGGED, rendered

TOOLS: Final[list[dict[str, Any]]] = [
    {"name": "run", "parameters": {"properties": {"n": {"type": "integer"}, "xs": {"type": "array"}}}},
    {"name": "now"},
    {"name": "python", "parameters": {"properties": {"code": {"type": "string"}}}},
]


def read(family: str, raw: str, is_cut: bool = False) -> tuple[list[tuple[str, str]], int]:
    events, malformed = replay(Case("", family, raw, "", "", [], TOOLS, False, is_cut=is_cut))
    assert replay(Case("", family, raw, "", "", [], TOOLS, False, is_cut=is_cut), range(1, len(raw))) == (
        events,
        malformed,
    )
    return [(call.name, call.arguments) for call in calls_of(events)], malformed


@pytest.mark.parametrize("is_cut", [True, False])
def test_an_output_that_ends_anywhere_has_the_whole_calls_of_the_full_output_or_a_malformed_one(is_cut: bool) -> None:
    for case in load_cases()[:: scaled(1, 8)]:
        events, malformed = replay(case)
        want = [(call.name, call.arguments) for call in calls_of(events)]
        # Code after `<|python_tag|>` has no end marker.
        if malformed or not want or (not is_cut and '{"code"' in want[0][1]):
            continue
        for end in range(1, len(case.raw)):
            short = Case(
                "", case.family, case.raw[:end], "", "", [], case.tools, case.start_in_reasoning, is_cut=is_cut
            )
            events, malformed = replay(short)
            calls = [(call.name, call.arguments) for call in calls_of(events)]
            assert malformed or calls == want[: len(calls)], short.raw


def test_an_id_of_a_mistral_call_without_the_marker_of_its_arguments_does_not_swallow_them() -> None:
    second = "[TOOL_CALLS]now[CALL_ID]123456789[ARGS]{}"
    whole = [("run", '{"n": 1}'), ("now", "{}")]
    assert read("mistral", '[TOOL_CALLS]run[CALL_ID]abcdefghi{"n": 1}' + second) == (whole, 0)
    assert read("mistral", "[TOOL_CALLS]run[CALL_ID]abcdefghi" + second) == (whole[1:], 1)


@pytest.mark.parametrize("family", TAGGED)
def test_markup_in_a_value_that_cannot_be_text_makes_the_call_malformed(family: str) -> None:
    end = TAGGED[family].form.param_end
    calls, malformed = read(family, rendered(family, [("run", {"n": f"1\n{end}\n2"})]))
    assert malformed == 1
    assert not any(is_json(arguments) for _, arguments in calls)
    if family in ("deepseek_v32", "deepseek_v4"):  # the tag says that the value of an unknown parameter is no text
        raw = rendered(family, [("now", {"a": f"1\n{end}\n2"})])
        assert read(family, raw)[1] == 0
        assert read(family, raw.replace('"true"', '"false"'))[1] == 1
    quoted = json.dumps([end, "a"])
    assert read(family, rendered(family, [("run", {"xs": quoted})])) == ([("run", f'{{"xs": {quoted}}}')], 0)


def test_a_header_of_a_message_to_a_tool_at_the_end_is_a_call_only_of_a_tool_without_parameters() -> None:
    start = "<|channel|>commentary to=functions."
    assert read("harmony", f"{start}now<|message|>") == ([("now", "{}")], 0)
    for name in ("run", "ru", "unknown"):
        assert read("harmony", f"{start}{name}") == ([], 1)


def test_code_that_a_limit_cuts_is_no_complete_call() -> None:
    assert read("llama3_json", "<|python_tag|>print(1)") == ([("python", '{"code": "print(1)"}')], 0)
    assert read("llama3_json", "<|python_tag|>print(1", is_cut=True) == ([("python", '{"code": "print(1')], 1)
    assert read("llama3_json", "<|python_tag|>")[0] == []
