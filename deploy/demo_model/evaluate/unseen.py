"""Handwritten prompts from `unseen.toml`, never used for training, though failures here have guided changes of the
generator."""

import tomllib
from pathlib import Path
from typing import Any, Final

from deploy.demo_model.corpus.samples import Sample

_TABLE: Final[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("unseen.toml").read_text("utf-8"))


def _tool(name: str) -> dict[str, Any]:
    tool = _TABLE["tools"][name]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": tool["about"],
            "parameters": {"type": "object", "properties": tool["properties"], "required": tool["required"]},
        },
    }


def _box(names: list[str], place: int) -> list[dict[str, Any]]:
    """Return the schemas of the named tools and of two others."""
    every = list(_TABLE["tools"])
    others = [every[(place * 2 + i) % len(every)] for i in range(len(every))]
    chosen = list(dict.fromkeys(names)) + [n for n in others if n not in names][:2]
    return [_tool(name) for name in sorted(chosen)]


def samples(category: str) -> list[Sample]:
    return [
        *_prompts(category),
        *_calls(category),
        *(_recalls() if category == "multi-turn" else ()),
        *(_results() if category == "tool results" else ()),
    ]


def _prompts(category: str) -> list[Sample]:
    return [
        Sample(
            category,
            [{"role": "user", "content": row["user"]}, {"role": "assistant", "content": row.get("answer", "")}],
            row["check"],
            tuple(row.get("keys", ())),
            skill="by hand",
        )
        for row in _TABLE["prompts"]
        if row["category"] == category
    ]


def _calls(category: str) -> list[Sample]:
    made: list[Sample] = []
    for place, row in enumerate(_TABLE["calls"]):
        if row["category"] == category:
            calls = [{"type": "function", "function": call} for call in row["calls"]]
            messages = [
                {"role": "user", "content": row["user"]},
                {"role": "assistant", "content": None, "tool_calls": calls},
            ]
            box = _box([call["name"] for call in row["calls"]], place)
            made.append(Sample(category, messages, "calls", tools=box, skill="by hand"))
    return made


def _recalls() -> list[Sample]:
    made: list[Sample] = []
    for row in _TABLE["recalls"]:
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i, text in enumerate([*row["history"], row["user"], ""])
        ]
        made.append(Sample("multi-turn", messages, "contains", tuple(row["keys"]), skill="by hand"))
    return made


def _results() -> list[Sample]:
    made: list[Sample] = []
    for place, row in enumerate(_TABLE["results"]):
        function = {"name": row["name"], "arguments": row["arguments"]}
        messages = [
            {"role": "user", "content": row["user"]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": row["raw"]},
            {"role": "assistant", "content": ""},
        ]
        box = _box([row["name"]], place)
        made.append(Sample("tool results", messages, "contains", tuple(row["keys"]), tools=box, skill="by hand"))
    return made
