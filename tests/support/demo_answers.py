"""Answers of the demo model to samples of its recipe, and whether they are right."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.demo_model.corpus.samples import Sample

SHIPPED: Final = Path(__file__).parents[2] / "worker" / "demo_model"
_CALL: Final = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(slots=True)
class DemoReply:
    """Model's reply: answer text, reasoning, tool calls, and whether the model ended the reply."""

    text: str
    thought: str | None
    calls: list[dict[str, Any]]
    stopped: bool


def parse(raw: str, *, stopped: bool) -> DemoReply:
    """Split a model's raw text into a reply. Malformed markup stays in the reply's text, which then counts as wrong."""
    thought = None
    if raw.startswith("<think>\n") and "</think>" in raw:
        inner, raw = raw.removeprefix("<think>\n").split("</think>", 1)
        thought, raw = inner.strip(), raw.removeprefix("\n\n")
    calls: list[dict[str, Any]] = []
    for found in _CALL.findall(raw):
        try:
            calls.append(json.loads(found))
        except ValueError:
            return DemoReply(raw, thought, [], stopped)
    return DemoReply(_CALL.sub("", raw).strip("\n"), thought, calls, stopped)


def is_right(sample: Sample, reply: DemoReply) -> bool:
    expected = sample.messages[-1]
    wanted_calls = [call["function"] for call in expected.get("tool_calls") or ()]
    if sample.thinking != bool(reply.thought):
        return False
    if wanted_calls or reply.calls:
        return _typed(reply.calls) == _typed(wanted_calls)
    text, answer = reply.text.strip(), str(expected["content"]).strip()
    match sample.check:
        case "contains":
            return all(_plain(key) in _plain(text) for key in sample.keys)
        case "json":
            try:
                return _typed(json.loads(text)) == _typed(json.loads(answer))
            except ValueError:
                return False
        case "calls":
            return True
        case "exact":
            return text == answer or (
                sample.skill not in ("repeat", "uppercase", "lowercase") and _plain(text) == _plain(answer)
            )


def _typed(value: Any) -> Any:
    """Return a value that compares equal only to an equal JSON value: plain Python has `True == 1`. 1 and 1.0 stay
    equal."""
    if isinstance(value, dict):
        return {k: _typed(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_typed(v) for v in value]
    return (isinstance(value, bool), isinstance(value, str), value)


def _plain(text: str) -> str:
    return text.lower().rstrip(".!").strip()
