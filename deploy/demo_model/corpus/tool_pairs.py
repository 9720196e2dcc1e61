"""Requests that need two calls of one tool."""

import re
from typing import Final

from .files import phrasings
from .tool_inventions import ACTIONS, parameter_key, spoken
from .tool_requests import FAMILIES, Ask, Family, Param, known, parameter, schema
from .tool_values import draw, identifier
from .words import NOUNS, Source

# Families whose tool has one plain parameter, so that two values need two calls.
_DOUBLE: Final = phrasings("tool_pairs", "twice")


def same_tool_twice(src: Source) -> tuple[list[Ask], str]:
    families = [f for f in FAMILIES if f.topic in _DOUBLE and len(f.params) == 1]
    if src.chance(0.35):
        return _invented_twice(src)
    family = src.pick(families)
    name = src.pick(family.names)
    param = parameter(src, family.params[0])
    tool = schema(src, name, src.pick(family.about), [param])
    values = [draw(src, param.kind) for _ in range(3 if src.chance(0.08) else 2)]
    if len({str(v) for _, v in values}) < len(values):
        return same_tool_twice(src)
    template = src.template(
        [ask for ask in family.asks if "it" not in ask.split() and "them" not in ask.split()] or family.asks
    )
    spoken = [s for s, _ in values]
    joined = ", ".join(spoken[:-1]) + " and " + spoken[-1]
    style = src.integer(0, 6)
    before = re.search(r"\b(in|of|for|at|user) \{0\}", template)
    if style == 0 and before:
        user = template.format(f" and {before[1]} ".join(spoken))
    elif style == 1:
        user = template.format("both " + joined if len(values) == 2 and '"' not in template else joined)
    elif style == 2:
        user = (
            template.format(spoken[0]).rstrip(".")
            + ". "
            + " ".join(
                src.pick(("And {}?", "Also {}.", "The same for {}.", "And for {}, too.")).format(s) for s in spoken[1:]
            )
        )
    elif style == 3:
        user = " ".join(template.format(s) if template[-1] in ".?!" else template.format(s) + "." for s in spoken)
    else:
        user = template.format(joined)
    asks = [Ask(tool, "", {"name": name, "arguments": {param.name: value}}, family.topic) for _, value in values]
    return asks, user


def same_request_twice(src: Source) -> tuple[list[Ask], str]:
    """Return two requests in a row for a tool with several parameters; the second one may omit the verb."""
    family = src.pick([f for f in FAMILIES if len(f.params) > 1])
    first = known(src, Family(family.names, family.about, family.params, family.asks))
    names = list(first.call["arguments"])
    template = src.pick(family.asks)
    asks, users = [], []
    for _ in range(2):
        values = [draw(src, spec.split(";")[1].strip()) for spec in family.params]
        asks.append(
            Ask(
                first.tool,
                "",
                {"name": first.call["name"], "arguments": dict(zip(names, (v for _, v in values), strict=True))},
                family.topic,
            )
        )
        users.append(template.format(*(said for said, _ in values)))
    if asks[0].call == asks[1].call:
        return same_request_twice(src)
    a, b = users[0].rstrip(".?!"), users[1]
    verb, _, rest = b.partition(" ")
    if template[0] != "{" and verb in phrasings("tool_pairs", "verbs"):
        b = rest if src.chance(0.65) else b[0].lower() + b[1:]
    else:
        b = b[:1].lower() + b[1:]
    return asks, a + src.pick((" and ", " and ", ", and ", " and also ", ", then ")) + b


def _invented_twice(src: Source) -> tuple[list[Ask], str]:
    stem, said = src.pick(ACTIONS)
    thing = src.coined(1, 2) if src.chance(0.5) else src.pick(NOUNS)
    name = identifier(src, [stem, thing])
    key, kind = parameter_key(src)
    while kind == "bool" or kind.split(":")[0] in ("words", "foods", "names", "numbers", "enum"):
        key, kind = parameter_key(src)
    (a, first), (b, second) = draw(src, kind), draw(src, kind)
    if first == second:
        return _invented_twice(src)
    tool = schema(
        src,
        name,
        f"{stem.capitalize()} a {thing}.",
        [Param(key, kind, f"The {key.replace('_', ' ')}" if src.chance(0.7) else "")],
    )
    said_key = spoken(key)
    verb = src.pick(said)
    user = src.pick(
        (
            f"{verb} the {thing} {a} and the {thing} {b}.",
            f"{verb} two {thing}s: one with {said_key} {a} and one with {said_key} {b}.",
            f"{verb} the {thing}s {a} and {b}.",
            f"{verb} the {thing} with {said_key} {a} and the {thing} with {said_key} {b}.",
            f"{verb} a {thing} with {said_key} {a}. Then {verb} a {thing} with {said_key} {b}.",
            f"{verb} the {thing} with {said_key} {a} and also the one with {said_key} {b}.",
            f"{verb} {thing} {a} and also {thing} {b}.",
            f"{verb} {thing} {a} and {thing} {b}.",
            f"{verb} {thing} {a} and {b}.",
        )
    )
    user = user[:1].upper() + user[1:]
    return [
        Ask(tool, "", {"name": name, "arguments": {key: value}}, f"invented:{stem}:{thing}")
        for value in (first, second)
    ], user
