"""A folder of other people's outputs and templates, where there is one.

`MLXD_PARSER_DATA` names a folder with `parser_cases.jsonl` (objects with `format`, `raw`, `tools`, `expected`, `meta`)
and `chat_templates/*.jinja`.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from protocol.checkpoint import ChatTemplates
from protocol.from_worker import DeltaKind
from tests.worker.output.parsers.replay import Case, calls_of, check_shape, random_cuts, replay, text_of
from worker.output.parsers.cli import BrokenTemplate, render
from worker.output.parsers.families import FAMILIES, detect_family, reasoning_end, start_in_reasoning

DATA = os.environ.get("MLXD_PARSER_DATA", "")
pytestmark = pytest.mark.skipif(not DATA, reason="MLXD_PARSER_DATA is not set")
# The set contradicts itself in places (one format, the same text, two meanings), and expects text behind calls to be
# dropped in one family and kept in others: this much must be right.
PASS_RATE = 0.96


def load() -> list[dict[str, Any]]:
    lines = (Path(DATA) / "parser_cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def case_of(record: dict[str, Any]) -> Case:
    start = True if record["meta"].get("starts_in_reasoning") else None
    return Case(record["id"], record["format"], record["raw"], "", "", [], record["tools"], start)


def is_expected(record: dict[str, Any]) -> bool:
    events, _ = replay(case_of(record))
    want, meta = record["expected"], record["meta"]
    for key, kind in (("content", DeltaKind.TEXT), ("reasoning", DeltaKind.REASONING)):
        asserted = want[key] is not None and meta.get(f"{key}_asserted", True)
        if asserted and text_of(events, kind).strip() != want[key].strip():
            return False
    calls = calls_of(events)
    return len(calls) == len(want["tool_calls"]) and all(
        got.name == call["name"]
        and fits(json.loads(got.arguments), call["arguments"], meta.get("match") == "asserted_subset")
        and call.get("id") in (None, got.id)
        for got, call in zip(calls, want["tool_calls"], strict=True)
    )


def fits(got: dict[str, Any], want: dict[str, Any], is_subset: bool) -> bool:
    return all(key in got and got[key] == value for key, value in want.items()) if is_subset else got == want


def test_the_outputs_are_parsed_as_expected() -> None:
    records = load()
    wrong = [record["id"] for record in records if not is_expected(record)]
    assert len(wrong) <= (1 - PASS_RATE) * len(records), wrong


def test_no_split_changes_the_events() -> None:
    rng = random.Random(0)
    for record in load():
        case = case_of(record)
        whole = replay(case)
        check_shape(*whole)
        for cuts in (list(range(1, len(case.raw))), *(random_cuts(case.raw, rng) for _ in range(8))):
            assert replay(case, cuts) == whole, record["id"]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where"},
                    "days": {"type": "integer", "description": "How long"},
                    "tags": {"type": "array", "items": {"type": "string"}, "description": "What"},
                    "options": {"type": "object", "properties": {"deep": {"type": "boolean"}}, "description": "How"},
                },
                "required": ["city"],
            },
        },
    }
]
ARGUMENTS = {"city": "Zürich <b>(alt)</b>\n", "days": 3, "tags": ["a", "b, c"], "options": {"deep": True}}


@pytest.mark.parametrize("reasoning", ["", "First I plan.\nThen I act."])
@pytest.mark.parametrize("content", ["", "I look."])
def test_what_templates_write_is_read_back(content: str, reasoning: str) -> None:
    """Models answer in the form in which their template renders an answer."""
    read_back = 0
    for path in sorted((Path(DATA) / "chat_templates").glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        call = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
        answer: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": [call]}
        if reasoning:
            answer |= {"reasoning_content": reasoning}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        try:
            prompt = render(template, messages, TOOLS, thinking=bool(reasoning))
            whole = render(template, [*messages, answer], TOOLS, thinking=bool(reasoning), opens_answer=False)
        except BrokenTemplate:
            continue
        raw = whole[len(prompt) :]
        if not whole.startswith(prompt) or "get_weather" not in raw:
            continue
        family = detect_family(ChatTemplates.of(template), frozenset(), "")
        is_open = start_in_reasoning(family, prompt)
        if is_open and reasoning_end(family) not in raw:
            continue  # An old answer is rendered without the reasoning that a new one has.
        events, malformed = replay(Case("", family, raw, "", "", [], TOOLS, is_open))
        assert malformed == 0, path.name
        assert [(call.name, json.loads(call.arguments)) for call in calls_of(events)] == [("get_weather", ARGUMENTS)], (
            path.name
        )
        said, thought = text_of(events, DeltaKind.TEXT).strip(), text_of(events, DeltaKind.REASONING).strip()
        # Some templates leave one of them out, and one renders content before a call as reasoning.
        assert said + thought in {reasoning + content, reasoning, content, content + reasoning, ""}, path.name
        assert all(text in said + thought for text in (reasoning, content) if text in raw), path.name
        read_back += 1
    assert read_back > 15


def test_every_template_is_detected() -> None:
    for path in sorted((Path(DATA) / "chat_templates").glob("*.jinja")):
        template = path.read_text(encoding="utf-8")
        family = detect_family(ChatTemplates.of(template), frozenset(), "")
        assert family in FAMILIES
        has_calls = "tool_call" in template and "tools" in template
        assert family not in ("none", "think") or not has_calls or "rwkv" in path.name, path.name
