"""Requests for common tools: the schema as a client sends it, a request, and the correct call.

The families of tools, in many spellings, are in `tables/tool_families.toml`. A parameter is written as `names; kind;
descriptions`, with `|` between descriptions. In a request, `{0}` is the value of the first parameter. An optional
parameter has a phrase that may follow the request. `tool_values.draw` defines the kinds.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from .files import table
from .tool_values import UNITS, draw
from .words import Source

_JSON_TYPES: Final = {
    "int": "integer",
    "number": "number",
    "flag": "boolean",
    "switch": "boolean",
    "mute": "boolean",
    "lock": "boolean",
    "foods": "array",
    "words": "array",
    "names": "array",
    "numbers": "array",
}


class Family(NamedTuple):
    """Family of one tool: spellings of its name, descriptions, parameters, requests, optional parameters with their
    phrases."""

    names: list[str]
    about: list[str]
    params: list[str]
    asks: list[str]
    optional: Sequence[tuple[str, str]] = ()
    topic: str = ""


FAMILIES: Final = tuple(Family(**family) for family in table("tool_families")["family"])


@dataclass(slots=True)
class Param:
    """Parameter of a tool's schema."""

    name: str
    kind: str
    about: str
    required: bool = True


@dataclass(slots=True)
class Ask:
    """Tool, a request for it, and the correct call."""

    tool: dict[str, Any]
    user: str
    call: dict[str, Any]
    topic: str


def schema(src: Source, name: str, about: str, params: list[Param]) -> dict[str, Any]:
    """Return the tool's schema as a client sends it; some optional keys are left out at random, because clients
    differ."""
    properties: dict[str, Any] = {}
    for param in params:
        kind, _, limits = param.kind.partition(":")
        shape: dict[str, Any] = {"type": _JSON_TYPES.get(kind, "string")}
        if param.about:
            shape["description"] = param.about
        if kind == "enum":
            shape["enum"] = limits.split(",")
        if shape["type"] == "array":
            shape["items"] = {"type": {"numbers": "number"}.get(kind, "string")}
        properties[param.name] = shape
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    required = [param.name for param in params if param.required]
    if required and src.chance(0.92):
        parameters["required"] = required
    if src.chance(0.15):
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if about:
        function["description"] = about
    function["parameters"] = parameters
    if src.chance(0.06):
        function["strict"] = True
    return {"type": "function", "function": function}


def known(src: Source, family: Family) -> Ask:
    """Return a request for a tool of a known family."""
    name = _respelled(src, src.pick(family.names))
    params: list[Param] = []
    slots: list[str] = []
    arguments: dict[str, Any] = {}
    for spec in family.params:
        param = parameter(src, spec)
        spoken, value = draw(src, param.kind)
        if slots and param.kind == "unit" and spoken in slots:
            spoken = value = next(unit for unit in UNITS if unit not in slots)
        params.append(param)
        slots.append(spoken)
        arguments[param.name] = value
    user = src.template(family.asks)
    tail = ""
    shown_optional = [pair for pair in family.optional if src.chance(0.65)]
    for spec, phrase in shown_optional:
        param = parameter(src, spec)
        if param.name in arguments or any(p.name == param.name for p in params):
            continue
        param.required = False
        params.append(param)
        if not src.chance(0.5) or len(arguments) > 3:
            continue
        yes, _, no = phrase.partition("~")
        if param.kind == "flag":
            value = src.chance(0.7) or not no
            tail += yes if value else no
        else:
            spoken, value = draw(src, param.kind)
            tail += phrase.replace("{v}", spoken)
        arguments[param.name] = value
    if tail and " in {0}" in user and src.chance(0.35):
        user = user.replace(" in {0}", tail.replace("{", "{{").replace("}", "}}") + " in {0}")
    elif tail:
        match = re.search(r"(?:, please)?[?.!]?$", user)
        end = user[match.start() :] if match else ""
        user = user.removesuffix(end) + tail.replace("{", "{{").replace("}", "}}") + end
    user = user.format(*slots)
    about = src.pick(family.about) if src.chance(0.95) else ""
    tool = schema(src, name, about, params)
    if src.chance(0.2):
        user = _polite(src, user)
    return Ask(tool, user, {"name": name, "arguments": arguments}, family.topic)


def _respelled(src: Source, name: str) -> str:
    """Return the tool's name, sometimes with a made-up part; held-out samples always get such a part."""
    if src.chance(0.75) and not src.held_out:
        return name
    extra = src.coined(1, 2)
    return src.pick((f"{name}_{extra}", f"{extra}_{name}", f"{extra}-{name}", f"{extra}{name[0].upper()}{name[1:]}"))


def _polite(src: Source, user: str) -> str:
    style = src.integer(0, 4)
    if style == 0:
        return user[:1].lower() + user[1:]
    if style == 1:
        return src.pick(("Hi! ", "Hello, ", "Hey, ", "OK. ", "Good morning! ")) + user
    if style == 2:
        return (user if user[-1] in '.?!"' else user + ".") + src.pick(
            (" Thanks!", " Thank you.", " Please use a tool.", " It is urgent.", " Please be quick.")
        )
    if style == 3:
        return user.rstrip(".?!")
    return (
        src.pick(("I would like you to do this: ", "Request: ", "My request: ", "Here is what I need. ", "One thing: "))
        + user
    )


def parameter(src: Source, spec: str) -> Param:
    names, kind, about = (part.strip() for part in spec.split(";"))
    name = src.pick(names.split())
    if src.chance(0.12):
        name = src.pick((f"{name}_{src.coined(1, 1)}", f"{src.coined(1, 1)}_{name}"))
    return Param(name, kind, src.pick(about.split("|")) if src.chance(0.9) else "")
