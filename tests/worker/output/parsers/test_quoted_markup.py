"""Markup in the values of tagged calls, of any family: it is text, and no value is cut without a report."""

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from protocol.from_worker import DeltaKind
from tests.support.scale import scaled
from tests.worker.output.parsers.replay import Case, calls_of, is_json, replay, text_of
from tests.worker.output.parsers.tagged_calls import MARKERS, TAGGED, rendered
from worker.output.parsers.call import LOOKAHEAD_LIMIT
from worker.output.parsers.parser import make_parser


def tool(name: str, *keys: str) -> dict[str, Any]:
    properties = {key: {"type": "string"} for key in keys}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS: Final = [tool("write", "path", "body"), tool("g", "q", "r"), tool("now")]
QUOTED: Final = [("g", {"q": "1"}), ("g", {"q": "a\nb", "r": "c"}), ("now", {}), ("h", {"z": "5", "path": "p"})]
CODE: Final = [
    '{"name": "f", "arguments": {"a": ["</parameter>"]}}', "def f():\n    return '</b>' < 1\n", "<html>\n</html>", "{",
    "</think>", "<think>", "&amp;", "\\", "[", "é", "```", "<", "</", ">", "<parameter", "<path>", "</path>",
]  # fmt: skip
WORDS: Final = ["x", "y z", "\nx\n", " x ", "\n\nx", "x\n"]
each_family = pytest.mark.parametrize("family", TAGGED)


def own_markers(family: str) -> list[str]:
    """Markers of the family, alone and in rows of two that look like the end of a call or like a parameter."""
    form = TAGGED[family].form
    alone = [form.param_end, form.call_end, *form.openers, *form.wrap_end, form.param + "path" + form.key_end]
    rows = [first + gap + second for first, second in itertools.product(alone, alone) for gap in ("", "\n")]
    return [*alone, *rows]


def has_whole_start(family: str, value: str) -> bool:
    """Whether the value holds the start of a call up to its first parameter, its end or its arguments as JSON."""
    form = TAGGED[family].form
    opener = form.call or form.wrap[0]
    pattern = f"{re.escape(opener)}[^<{{]*(?:{re.escape(form.param)}|{re.escape(form.call_end)}|{{)"
    return re.search(pattern, value) is not None


def read(family: str, raw: str, cuts: Sequence[int] = ()) -> tuple[list[tuple[str, str]], str, int]:
    events, malformed = replay(Case("", family, raw, "", "", [], TOOLS, False), cuts)
    return [(call.name, call.arguments) for call in calls_of(events)], text_of(events, DeltaKind.TEXT), malformed


@st.composite
def quoting_values(draw: st.DrawFn) -> str:
    """Values with markup of every family and whole calls of every family, each beside ordinary text."""
    piece = st.one_of(
        st.sampled_from(MARKERS),
        st.builds(rendered, st.sampled_from(sorted(TAGGED)), st.sampled_from([[call] for call in QUOTED])),
        st.builds(rendered, st.sampled_from(sorted(TAGGED)), st.just(QUOTED)),
        st.sampled_from(CODE),
    )
    parts = draw(st.lists(st.tuples(piece, st.sampled_from(WORDS)), max_size=6))
    return draw(st.sampled_from(["", "x", "x "])) + "".join(part + word for part, word in parts)


def cut_places(raw: str, draw: st.DataObject) -> list[int]:
    return sorted(set(draw.draw(st.lists(st.integers(0, len(raw)), max_size=8))))


AFTER: Final = ["", "\n", "\nDone.", "call"]


@each_family
@given(value=quoting_values(), after=st.sampled_from(AFTER), data=st.data())
@settings(max_examples=scaled(400, 25), deadline=None)
def test_a_value_that_quotes_markup_of_any_family_is_read_as_it_was_written(
    family: str, value: str, after: str, data: st.DataObject
) -> None:
    arguments = {"path": "a", "body": value}
    calls = [("write", arguments), *([("now", {})] if after == "call" else [])]
    raw = rendered(family, calls) + ("" if after == "call" else after)
    found, content, malformed = read(family, raw)
    assert [(name, json.loads(text)) for name, text in found] == calls
    assert content.strip() == after.replace("call", "").strip()
    assert not malformed
    assert read(family, raw, cut_places(raw, data)) == (found, content, malformed)
    assert read(family, raw, range(1, len(raw))) == (found, content, malformed)


@each_family
@given(data=st.data(), after=st.sampled_from(AFTER))
@settings(max_examples=scaled(600, 40), deadline=None)
def test_no_value_is_cut_without_a_report_however_its_own_markers_stand_in_it(
    family: str, data: st.DataObject, after: str
) -> None:
    pieces = [*own_markers(family), *own_markers(family), *CODE, *WORDS, "\n", " ", "long " * 60]
    value = "x" + "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=6))) + "x"
    assume(not has_whole_start(family, value))
    calls = [("write", {"path": "a", "body": value}), *([("now", {})] if after == "call" else [])]
    raw = rendered(family, calls) + ("" if after == "call" else after)
    whole = read(family, raw)
    assert read(family, raw, cut_places(raw, data)) == whole
    assert read(family, raw, range(1, len(raw))) == whole
    found, _, malformed = whole
    is_right = [(name, json.loads(text)) for name, text in found if is_json(text)] == calls
    assert is_right or malformed, raw


def streamed(family: str, raw: str) -> tuple[int, str]:
    """The most characters that are held back after the start of a call, and the arguments."""
    parser, most, value, shown = make_parser(family, tools=TOOLS, start_in_reasoning=False), 0, "", 0
    for at, char in enumerate(raw):
        events = parser.feed(char)
        value += "".join(event.text for event in events if event.kind is DeltaKind.TOOL_ARGS)
        shown = at + 1 if events else shown
        if parser.saw_tool_call:
            most = max(most, at + 1 - shown)
    value += "".join(event.text for event in parser.finish() if event.kind is DeltaKind.TOOL_ARGS)
    return most, value


@each_family
def test_a_stream_holds_back_no_more_than_a_lookahead_and_ordinary_text_not_at_all(family: str) -> None:
    form = TAGGED[family].form
    longest = max(map(len, (*form.openers, *form.ends, form.param, form.param_end))) + 1
    plain = "def f(a, b): return a\n" * 40
    start, end = rendered(family, [("write", {"path": "a", "body": "|body|"})]).split("|body|")
    most, arguments = streamed(family, start + plain + end)
    assert json.loads(arguments)["body"] == plain
    assert most <= len(start) + len(end)
    gaps = (
        form.param_end + " " * 900,
        form.param_end + "\n" + form.call_end + "\n" + "y" * 900,
        form.openers[0] + "z" * 900,
    )
    for quoted in gaps:
        most, _ = streamed(family, f"{start}x{quoted}{plain}{end}")
        assert most <= LOOKAHEAD_LIMIT + longest + len(start), quoted[:40]


@each_family
def test_an_end_of_the_call_and_a_whole_other_call_in_a_value_are_read_as_two_calls(family: str) -> None:
    calls = [("write", {"path": "a", "body": "x"}), ("g", {"q": "1"})]
    written_as_two = rendered(family, calls)
    before, after = rendered(family, [("write", {"path": "a", "body": "|body|"})]).split("|body|")
    value = written_as_two.removeprefix(before).removesuffix(after)
    # Both readings are legal. No parser can know that the model meant the second call as text.
    assert before + value + after == written_as_two
    found, _, malformed = read(family, before + value + after)
    assert [(name, json.loads(text)) for name, text in found] == calls
    assert not malformed


@pytest.mark.parametrize("size", [10, 400])
@each_family
def test_an_end_of_the_call_in_a_value_is_text_before_the_real_end_and_reported_if_that_is_far(
    family: str, size: int
) -> None:
    inner = rendered(family, [("write", {"path": "a", "body": "|body|"})]).partition("|body|")[2]
    value = "x" + inner + "y" * size
    found, _, malformed = read(family, rendered(family, [("write", {"path": "a", "body": value})]))
    if size == 10:
        assert [json.loads(text) for _, text in found] == [{"path": "a", "body": value}]
    assert bool(malformed) == (size > 10)


def m3(*parameters: tuple[str, str]) -> str:
    mark = "]<]minimax[>["
    inner = "".join(f"{mark}<{key}>{value}{mark}</{key}>" for key, value in parameters)
    return f'{mark}<tool_call>\n{mark}<invoke name="write">{inner}{mark}</invoke>\n{mark}</tool_call>'


@given(data=st.data(), after=st.sampled_from(["", "\nDone."]))
@settings(max_examples=scaled(400, 60), deadline=None)
def test_text_of_a_minimax_m3_call_may_hold_any_single_tags_and_whole_calls(data: st.DataObject, after: str) -> None:
    mark = "]<]minimax[>["
    tags = [f"{mark}<{slash}{tag}>" for slash in ("", "/") for tag in ("path", "body", "x", "invoke", "tool_call")]
    pieces = [*MARKERS, *CODE, m3(("path", "p"), ("body", "q")), *([] if after else tags)]
    words = st.tuples(st.sampled_from(pieces), st.sampled_from(["x", " y ", "\nx\n"]))
    value = "x" + "".join(piece + word for piece, word in data.draw(st.lists(words, max_size=5)))
    raw = m3(("path", "a"), ("body", value)) + after
    whole = read("minimax_m3", raw)
    assert [json.loads(text) for _, text in whole[0]] == [{"path": "a", "body": value}]
    assert (whole[1].strip(), whole[2]) == (after.strip(), 0)
    assert read("minimax_m3", raw, range(1, len(raw))) == whole


@pytest.mark.parametrize(
    "raw",
    [
        m3(("other", "1"), ("other", "2")),
        m3(("path", "a")).replace("]<]minimax[>[<path>", "path: ]<]minimax[>[<path>"),
        m3(("other", "text ]<]minimax[>[<x>1]<]minimax[>[</x>")),
    ],
)
def test_a_minimax_m3_call_with_a_key_twice_or_text_that_no_parameter_has_is_malformed(raw: str) -> None:
    calls, _, malformed = read("minimax_m3", raw)
    assert malformed == 1
    assert not any(is_json(arguments) for _, arguments in calls)


def test_a_key_of_a_minimax_m3_call_is_written_twice_only_with_equal_values() -> None:
    for key in ("path", "other"):
        calls, _, malformed = read("minimax_m3", m3((key, "a"), (key, "b")))
        assert malformed == 1
        assert not any(is_json(arguments) for _, arguments in calls)
        assert read("minimax_m3", m3((key, "a"), (key, "a"))) == ([("write", f'{{"{key}": "a"}}')], "", 0)


def test_a_minimax_m3_call_may_have_its_arguments_as_json() -> None:
    raw = m3().replace('"write">', '"write">{"path": "a"}')
    assert read("minimax_m3", raw) == ([("write", '{"path": "a"}')], "", 0)


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "object", "properties": {"item": {"type": "string"}}}, {"item": "a"}),
        ({"type": "object"}, {"item": "a"}),
        ({"type": ["object", "null"]}, {"item": "a"}),
        ({"type": "array", "items": {"type": "string"}}, ["a"]),
        ({"type": ["array", "object"]}, ["a"]),
        ({}, ["a"]),
    ],
)
def test_an_item_in_a_minimax_m3_call_is_a_property_where_the_schema_wants_an_object(
    schema: dict[str, Any], value: Any
) -> None:
    mark = "]<]minimax[>["
    raw = m3(("path", f"{mark}<item>a{mark}</item>"))
    tools = [{"name": "write", "parameters": {"properties": {"path": schema}}}]
    case = Case("", "minimax_m3", raw, "", "", [], tools, False)
    events, malformed = replay(case)
    assert [json.loads(call.arguments) for call in calls_of(events)] == [{"path": value}]
    assert malformed == 0
    assert replay(case, range(1, len(raw))) == (events, malformed)
