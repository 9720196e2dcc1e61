"""Anthropic's `context_management`: what Claude Code sends, thinking that is cleared, and edits that are refused."""

import json
from typing import Any

import pytest

from gateway.api.anthropic.request import decode_count, decode_messages, lower_prompt
from gateway.errors import BadRequest, Unsupported

EDIT = "clear_thinking_20251015"


def assistant(thought: str, *, calls: bool) -> dict[str, Any]:
    last = {"type": "tool_use", "id": "a", "name": "f", "input": {}} if calls else {"type": "text", "text": "done"}
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": thought, "signature": "s"}, last]}


RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "4"}]}
# Three turns with thinking; the second goes over a call and its result.
MESSAGES = [
    {"role": "user", "content": "q1"},
    assistant("t1", calls=False),
    {"role": "user", "content": "q2"},
    assistant("t2a", calls=True),
    RESULT,
    assistant("t2b", calls=False),
    {"role": "user", "content": "q3"},
    assistant("t3", calls=True),
    RESULT,
]


def thoughts(management: Any) -> list[str]:
    fields = {"messages": MESSAGES, "max_tokens": 5, "context_management": management}
    request, unknown = decode_messages(json.dumps(fields).encode())
    assert unknown == []
    counted, _ = decode_count(json.dumps(fields).encode())
    prompt, _ = lower_prompt(request)
    assert lower_prompt(counted)[0] == prompt
    assert len(prompt.messages) == len(MESSAGES)
    return [turn["reasoning_content"] for turn in prompt.messages if "reasoning_content" in turn]


@pytest.mark.parametrize(
    ("management", "kept"),
    [
        (None, ["t1", "t2a", "t2b", "t3"]),
        ({}, ["t1", "t2a", "t2b", "t3"]),
        ({"edits": []}, ["t1", "t2a", "t2b", "t3"]),
        # As Claude Code sends it by default, and after a long pause.
        ({"edits": [{"type": EDIT, "keep": "all"}]}, ["t1", "t2a", "t2b", "t3"]),
        ({"edits": [{"type": EDIT, "keep": {"type": "thinking_turns", "value": 1}}]}, ["t3"]),
        ({"edits": [{"type": EDIT, "keep": {"type": "all"}}]}, ["t1", "t2a", "t2b", "t3"]),
        ({"edits": [{"type": EDIT, "keep": {"type": "thinking_turns", "value": 2}}]}, ["t2a", "t2b", "t3"]),
        ({"edits": [{"type": EDIT, "keep": {"type": "thinking_turns", "value": 9}}]}, ["t1", "t2a", "t2b", "t3"]),
        ({"edits": [{"type": EDIT}]}, ["t3"]),
    ],
)
def test_thinking_of_old_turns_is_cleared_as_far_as_it_is_asked_for(management: Any, kept: list[str]) -> None:
    assert thoughts(management) == kept


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "clear_tool_uses_20250919"},
        {"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 3}},
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 50000}},
    ],
)
def test_edits_that_are_not_done_are_refused(edit: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as refused:
        thoughts({"edits": [{"type": EDIT, "keep": "all"}, edit]})
    assert refused.value.param == "context_management.edits.1"
    assert edit["type"] in refused.value.message


@pytest.mark.parametrize("keep", ["some", {"type": "thinking_turns", "value": 0}, {"type": "words", "value": 1}])
def test_an_unknown_measure_of_thinking_is_refused(keep: Any) -> None:
    with pytest.raises(BadRequest, match="keep"):
        thoughts({"edits": [{"type": EDIT, "keep": keep}]})
