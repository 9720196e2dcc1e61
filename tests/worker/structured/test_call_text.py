"""Calls that mlxd itself writes into a prompt are in the notation that the model's parser reads."""

import json
from typing import Any, Final

import pytest

from protocol.from_worker import DeltaKind
from tests.support.calls import CALLING, tool
from tests.worker.output.parsers.replay import Case, calls_of, replay, text_of
from worker.structured.tool_grammar.call_text import WrittenCall, call_text

_ARGUMENTS: Final[dict[str, Any]] = {
    "path": "src/main.py",
    "body": 'if "a" < b & c:\n    print(\'x\')\n\n    # </think> [1, 2], {"k": v}',
    "count": 3,
    "ratio": -0.5,
    "deep": True,
    "none": None,
    "tags": ["one", "two words"],
    "nested": {"inner": {"flag": False, "list": [1, 2]}, "text": "ünï ✓"},
}
_KINDS: Final = {
    "path": "string", "body": "string", "count": "integer", "ratio": "number", "deep": "boolean", "none": "null",
    "tags": "array", "nested": "object", "odd key": "string",
}  # fmt: skip
TOOLS: Final = [
    tool("write_file", {"type": "object", "properties": {key: {"type": kind} for key, kind in _KINDS.items()}}),
    tool("now", {"type": "object", "properties": {}}),
]
CALLS: Final[dict[str, list[tuple[str, dict[str, Any]]]]] = {
    "one": [("write_file", _ARGUMENTS)],
    "without arguments": [("now", {})],
    "an empty text": [("write_file", {"path": "", "count": 0})],
    "several": [("write_file", {"path": "a"}), ("now", {}), ("write_file", {"path": "b", "tags": []})],
    "a key with a space": [("write_file", {"odd key": "v", "path": "a"})],
}


@pytest.mark.parametrize("family", CALLING)
@pytest.mark.parametrize("calls", CALLS.values(), ids=CALLS)
def test_the_parser_of_a_family_reads_the_calls_that_are_written_for_it(
    family: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    written = [WrittenCall(name, args, at, f"abcdefghi{at}") for at, (name, args) in enumerate(calls)]
    raw = call_text(family, written)
    events, malformed = replay(Case("", family, raw, "", "", [], TOOLS, start_in_reasoning=False))

    assert [(call.name, json.loads(call.arguments)) for call in calls_of(events)] == calls, raw
    assert malformed == 0, raw
    assert text_of(events, DeltaKind.TEXT).strip() == "", raw
