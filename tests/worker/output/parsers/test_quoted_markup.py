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
from worker.output.parsers.parser import make_parser
from worker.output.parsers.xml_values import LOOKAHEAD_LIMIT


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
        st.builds(rendered, st.sampled_from(sorted(TAGGED)), st.sampled_from(QUOTED).map(lambda call: [call])),
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
