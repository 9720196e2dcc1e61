"""Tools to call, the markers of every family, and whether an output holds valid calls."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import jsonschema

from protocol.from_worker import DeltaKind
from worker.output.parsers.channels import Channels
from worker.output.parsers.events import Event
from worker.output.parsers.families import FAMILIES
from worker.output.parsers.parser import make_parser
from worker.structured.tool_grammar.build import has_calls

CALLING: Final = [family for family in FAMILIES if has_calls(family)]
_WEATHER: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "a place ::= any"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "coords": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        "options": {
            "type": "object",
            "properties": {
                "deep": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
                "who": {"$ref": "#/$defs/person"},
            },
            "required": ["tags"],
        },
        "note": {"type": ["string", "null"]},
        "extra": {},
        "ratio": {"type": "number"},
    },
    "required": ["city", "days", "unit", "options"],
    "$defs": {
        "person": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 5}, "child": {"$ref": "#/$defs/person"}},
        }
    },
}
_SWITCH: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "level": {"type": "integer"}},
    "required": ["on"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **({"parameters": parameters} if parameters else {})}}


TOOLS: Final = [tool("get_weather", _WEATHER), tool("now"), tool("set-it", _SWITCH)]
_MARKER: Final = re.compile(
    r"｜DSML｜|<[|｜][^<>\s]*?[|｜]>|</?(?:think|tool_call|arg_key|arg_value)>|\[/?[A-Z_]+\]|<[|][a-z_]+>|<[a-z_]+[|]>"
)


def markers() -> list[str]:
    """Markup that is a control token in some family's vocabulary."""
    return sorted(
        {found for family in FAMILIES.values() for text in _strings(family) for found in _MARKER.findall(text)}
    )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _strings(item)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _strings(getattr(value, each.name))


def reasoning_end(family: str) -> str:
    """A prompt's end after which no reasoning comes; "" where the grammar has it."""
    grammar = FAMILIES[family].grammar
    return grammar.think.ends[0] if not isinstance(grammar, Channels) and grammar.think else ""


@dataclass
class Called:
    """An output as a family's parser reads it."""

    calls: list[tuple[str, str]]
    content: str
    malformed: int

    @classmethod
    def read(cls, family: str, text: str, tools: Sequence[dict[str, Any]] = TOOLS) -> "Called":
        parser = make_parser(family, tools=tools, start_in_reasoning=False)
        events = [*parser.feed(text), *parser.finish()]
        return cls.of(events, parser.malformed)

    @classmethod
    def of(cls, events: Sequence[Event], malformed: int) -> "Called":
        names = [event.tool.name for event in events if event.kind is DeltaKind.TOOL_BEGIN and event.tool]
        arguments = ["" for _ in names]
        for event in events:
            if event.kind is DeltaKind.TOOL_ARGS and event.tool:
                arguments[event.tool.index] += event.text
        content = "".join(event.text for event in events if event.kind is DeltaKind.TEXT)
        return cls(list(zip(names, arguments, strict=True)), content, malformed)


def check(calls: Sequence[tuple[str, str]], tools: Sequence[dict[str, Any]] = TOOLS) -> None:
    """Every call is one of a tool, with arguments that its schema allows."""
    assert calls
    schemas = {each["function"]["name"]: each["function"].get("parameters", {}) for each in tools}
    for name, arguments in calls:
        # Without a look at the schema itself, which is ours.
        jsonschema.validators.validator_for(schemas[name])(schemas[name]).validate(json.loads(arguments))
