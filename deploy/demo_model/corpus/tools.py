"""Conversations with tools: calls, results, and requests for which no tool is suitable."""

import json
from typing import Any, Final

from . import arithmetic, counting, facts, smalltalk, transforms
from .files import phrasings, table
from .samples import Sample, Turn
from .tool_inventions import invented
from .tool_pairs import same_request_twice, same_tool_twice
from .tool_requests import FAMILIES, Ask, known
from .tool_results import result
from .words import Source

NO_TOOL: Final = "I do not have a tool for that."


def one_ask(src: Source, *, like: Ask | None = None) -> Ask:
    if src.chance(0.5):
        return invented(src, like)
    return known(src, src.pick(FAMILIES))


def toolbox(src: Source, asks: list[Ask], size: int) -> list[dict[str, Any]]:
    """Return the tools of `asks` and other tools, in random order."""
    tools = [ask.tool for ask in asks]
    taken = {tool["function"]["name"] for tool in tools}
    topics = {ask.topic for ask in asks}
    while len(tools) < size:
        other = one_ask(src, like=src.pick(asks) if asks and src.chance(0.3) else None)
        if other.tool["function"]["name"] in taken or other.topic in topics:
            continue
        taken.add(other.tool["function"]["name"])
        topics.add(other.topic)
        tools.append(other.tool)
    src.rng.shuffle(tools)
    return tools


def calls_of(asks: list[Ask]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": ask.call} for ask in asks]


def call_thought(asks: list[Ask]) -> str:
    parts: list[str] = []
    for ask in asks:
        values = ", ".join(
            f"{k} is {json.dumps(v, ensure_ascii=False) if not isinstance(v, str) else v}"
            for k, v in ask.call["arguments"].items()
        )
        parts.append(f"The tool {ask.call['name']} fits." + (f" So {values}." if values else ""))
    return " ".join(parts)


def one_call(src: Source) -> Sample:
    ask = one_ask(src)
    tools = toolbox(src, [ask], src.integer(1, 4))
    messages = [{"role": "user", "content": ask.user}, _calling([ask])]
    return Sample("tool call", messages, "calls", tools=tools)


def _calling(asks: list[Ask]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "reasoning_content": call_thought(asks), "tool_calls": calls_of(asks)}


def two_calls(src: Source) -> Sample:
    roll = src.rng.random()
    if roll < 0.35:
        asks, user = same_tool_twice(src)
    elif roll < 0.5:
        asks, user = same_request_twice(src)
    else:
        first = one_ask(src)
        second = one_ask(src)
        while second.topic == first.topic or second.call["name"] == first.call["name"]:
            second = one_ask(src)
        asks = [first, second]
        a, b = first.user, second.user
        lowered = b[:1].lower() + b[1:]
        style = src.integer(0, 6)
        stop = a if a[-1] in ".?!" else a + "."
        plain = a.rstrip(".?!")
        user = (
            f"{stop} {b}",
            f"{stop} Also, {lowered}",
            f"{plain} and {lowered}",
            f"{stop} Then {lowered}",
            f"{plain}, and also {lowered}",
            f"First: {stop} Second: {b}",
            f"{stop} And {lowered}",
        )[style]
    tools = toolbox(
        src,
        asks[:1] if asks[0].tool is asks[1].tool else asks,
        src.integer(1 if asks[0].tool is asks[1].tool else 2, 4),
    )
    return Sample("two tool calls", [{"role": "user", "content": user}, _calling(asks)], "calls", tools=tools)


_PLAIN_SKILLS: Final = (
    (smalltalk.smalltalk, 3.0),
    (facts.capital, 1.0),
    (facts.opposite, 0.6),
    (facts.colour, 0.5),
    (facts.day, 0.5),
    (counting.spelling, 0.6),
    (counting.counting, 0.8),
    (transforms.repeat, 0.6),
    (transforms.uppercase, 0.5),
    (transforms.reverse, 0.5),
    (facts.plain, 0.4),
    (arithmetic.arithmetic, 0.8),
    (transforms.extract, 0.5),
)
_CLAIMED: Final = frozenset(phrasings("tools", "claimed"))


def no_call(src: Source) -> Sample:
    if src.chance(0.5):
        turn: Turn = src.weighted(_PLAIN_SKILLS)(src)
        asks = [one_ask(src) for _ in range(src.integer(1, 4))]
        while any(ask.topic in _CLAIMED for ask in asks):
            asks = [one_ask(src) for _ in range(len(asks))]
        names: dict[str, dict[str, Any]] = {ask.tool["function"]["name"]: ask.tool for ask in asks}
        answer = {
            "role": "assistant",
            "content": turn.answer,
            "reasoning_content": f"No tool is needed. {turn.thought}",
        }
        return Sample(
            "no tool call", [{"role": "user", "content": turn.user}, answer], "calls", tools=list(names.values())
        )
    wanted = one_ask(src)
    others = [one_ask(src) for _ in range(src.integer(1, 4))]
    while any(
        other.topic.split(":")[-1] == wanted.topic.split(":")[-1] or _near(other.topic, wanted.topic)
        for other in others
    ):
        others = [one_ask(src) for _ in range(len(others))]
    names = {ask.tool["function"]["name"]: ask.tool for ask in others}
    answer = {"role": "assistant", "content": NO_TOOL, "reasoning_content": "No tool fits this request."}
    return Sample(
        "no tool call", [{"role": "user", "content": wanted.user}, answer], "calls", tools=list(names.values())
    )


_NEAR: Final = tuple(frozenset(group) for group in table("tools")["near"])


def _near(left: str, right: str) -> bool:
    return any(left in group and right in group for group in _NEAR)


def answered(src: Source) -> Sample:
    """Return a conversation that contains tool results; sometimes the user then makes another request."""
    sample = two_calls(src) if src.chance(0.25) else one_call(src)
    messages = sample.messages
    said: list[str] = []
    keys: list[str] = []
    calling = messages[-1]
    for index, call in enumerate(calling["tool_calls"]):
        raw, told, found = result(src)
        while len(calling["tool_calls"]) > 1 and "error" in told:
            raw, told, found = result(src)
        call["id"] = f"call_{src.integer(1000, 9999)}{index}"
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": raw})
        said.append(told)
        keys += found
    if not src.chance(0.5):
        calling.pop("reasoning_content", None)
    answer = " ".join(said)
    messages.append(
        {
            "role": "assistant",
            "content": answer,
            "reasoning_content": "The tool answered. I tell the user what it says.",
        }
    )
    if src.chance(0.25):
        return _again(src, sample)
    return Sample("tool results", messages, "contains", tuple(keys), tools=sample.tools)


def _again(src: Source, sample: Sample) -> Sample:
    """Add a further request to the conversation, for another tool or for none."""
    assert sample.tools is not None
    if src.chance(0.4):
        turn: Turn = src.weighted(
            ((smalltalk.smalltalk, 2.0), (facts.capital, 1.0), (facts.opposite, 1.0), (facts.colour, 1.0))
        )(src)
        messages = [
            *sample.messages,
            {"role": "user", "content": turn.user},
            {"role": "assistant", "content": turn.answer, "reasoning_content": f"No tool is needed. {turn.thought}"},
        ]
        return Sample("no tool call", messages, "calls", tools=sample.tools)
    ask = one_ask(src)
    while any(ask.call["name"] == tool["function"]["name"] for tool in sample.tools):
        ask = one_ask(src)
    tools = [*sample.tools[:3], ask.tool]
    used = {call["function"]["name"] for m in sample.messages for call in m.get("tool_calls") or ()}
    tools = [ask.tool, *(tool for tool in sample.tools if tool["function"]["name"] in used)]
    src.rng.shuffle(tools)
    return Sample(
        "tool call", [*sample.messages, {"role": "user", "content": ask.user}, _calling([ask])], "calls", tools=tools
    )


SKILLS: Final = ((one_call, 6.0), (two_calls, 3.5), (no_call, 3.0), (answered, 4.0))
