"""Guarantees of a parser to its caller."""

import pytest

from protocol.from_worker import DeltaKind, ToolCallDelta
from worker.output.parsers.events import Event
from worker.output.parsers.families import FAMILIES, UnknownFamily, reasoning_end
from worker.output.parsers.parser import call_ids, make_parser


def test_arguments_leave_as_they_are_generated() -> None:
    parser = make_parser("hermes", new_id=lambda: "call_1")
    events = parser.feed('<tool_call>{"name": "f", "arguments": {"code": "one ')
    assert events == [
        Event(DeltaKind.TOOL_BEGIN, tool=ToolCallDelta(0, "call_1", "f")),
        Event(DeltaKind.TOOL_ARGS, '{"code": "one ', ToolCallDelta(0, "call_1")),
    ]
    assert parser.feed("two") == [Event(DeltaKind.TOOL_ARGS, "two", ToolCallDelta(0, "call_1"))]


def test_a_string_parameter_streams_before_its_end_tag() -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"code": {"type": "string"}}}}}]
    parser = make_parser("qwen3_coder", tools=tools)
    parser.feed("<tool_call>\n<function=f>\n<parameter=code>\n")
    assert [event.text for event in parser.feed('print("x")')] == ['{"code": "print(\\"x\\")']


def test_plain_text_is_never_held_back() -> None:
    parser = make_parser("qwen3_coder", start_in_reasoning=False)
    assert parser.feed("The answer") == [Event(DeltaKind.TEXT, "The answer")]


def test_a_possible_marker_is_held_until_it_is_none() -> None:
    parser = make_parser("hermes")
    assert parser.feed("a <tool") == [Event(DeltaKind.TEXT, "a")]
    assert parser.feed("box>") == [Event(DeltaKind.TEXT, " <toolbox>")]


def test_generated_ids_differ_and_calls_are_numbered() -> None:
    parser = make_parser("hermes")
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    begins = [event.tool for event in parser.feed(text) if event.kind is DeltaKind.TOOL_BEGIN]
    assert [tool.index for tool in begins if tool] == [0, 1]
    assert len({tool.call_id for tool in begins if tool}) == 2
    assert parser.saw_tool_call


def ids_of(family: str, raw: str) -> list[str]:
    parser = make_parser(family, new_id=call_ids("answer"))
    return [event.tool.call_id for event in parser.feed(raw) if event.kind is DeltaKind.TOOL_BEGIN and event.tool]


NEW = [make() for make in [call_ids("answer")] for _ in range(2)]


@pytest.mark.parametrize(
    ("written", "ids"),
    [
        (("call_1", "call_1"), ["call_1", NEW[0]]),
        (("functions.f:0", "A1b2-c3_d4"), ["functions.f:0", "A1b2-c3_d4"]),
        (("x" * 65, "x" * 64), [NEW[0], "x" * 64]),
        (("a b", "a\\nb"), NEW),
        (("é", "f\\ud800"), NEW),
    ],
)
def test_an_id_that_the_model_writes_is_kept_if_it_is_plain_and_new(written: tuple[str, str], ids: list[str]) -> None:
    calls = (f'<tool_call>{{"name": "f", "id": "{one}", "arguments": {{}}}}</tool_call>' for one in written)
    assert ids_of("hermes", "".join(calls)) == ids


def test_an_id_in_the_markup_of_a_call_is_kept_by_the_same_rule() -> None:
    assert ids_of("mistral", "[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{}") == ["abc123def"]
    assert ids_of("mistral", "[TOOL_CALLS]f[CALL_ID]ab c[ARGS]{}") == NEW[:1]


def test_half_a_surrogate_in_the_name_of_a_tool_becomes_a_question_mark() -> None:
    (begin, *_) = make_parser("hermes").feed('<tool_call>{"name": "f\\ud800", "arguments": {}}</tool_call>')
    assert begin.tool is not None
    assert begin.tool.name == "f?"


def test_without_tools_their_markup_is_text() -> None:
    raw = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = make_parser("hermes", parse_tools=False)
    assert parser.feed(raw) + parser.finish() == [Event(DeltaKind.TEXT, raw)]
    assert not parser.saw_tool_call


def test_a_parser_knows_when_the_output_is_in_its_reasoning() -> None:
    parser = make_parser("hermes", start_in_reasoning=True)
    assert parser.in_reasoning
    parser.feed("plan")
    assert parser.in_reasoning
    parser.feed("</think>")
    assert not parser.in_reasoning


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_closes_reasoning_does_so_in_every_family(family: str) -> None:
    parser = make_parser(family, start_in_reasoning=True)
    assert parser.in_reasoning == bool(reasoning_end(family))
    if parser.in_reasoning:
        events = parser.feed("plan" + reasoning_end(family) + "Yes.") + parser.finish()
        assert [(event.kind, event.text) for event in events] == [
            (DeltaKind.REASONING, "plan"),
            (DeltaKind.TEXT, "Yes."),
        ]


def test_text_after_the_end_is_ignored() -> None:
    parser = make_parser("none")
    assert parser.finish() == []
    assert parser.feed("late") == []


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(UnknownFamily):
        make_parser("unheard-of")
