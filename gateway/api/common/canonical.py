"""Dialect-independent parts of a request: turns, tools, tool choice and thinking budget.

Each dialect's lowering makes these parts. All dialects then turn them into a `protocol.Generate` in the same way.
"""

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from gateway.errors import BadRequest, invalid_choice
from gateway.media.media_reference import Reference
from protocol.to_worker import ChatPrompt, Media

T = TypeVar("T")

# A value must be encodable inside this many additional lists, because a message nests it further.
_SPARE_DEPTH: Final = 50

TOOLS_MAX: Final = 512
# The worker searches every sequence of a request for each stop string.
STOPS_MAX: Final = 16
STOP_CHARS_MAX: Final = 1024
# Maps the efforts of OpenAI and other servers to those that templates know. An empty effort turns thinking off.
EFFORTS: Final[dict[str, str]] = {
    "none": "",
    "minimal": "",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}


class Call(Struct, frozen=True):
    """A tool call of an earlier turn. `arguments` is JSON text, as the model wrote it."""

    id: str
    name: str
    arguments: str


def arguments_text(given: str | dict[str, Any] | None) -> str:
    """Return a call's arguments as JSON text, also if a client sends them as an object."""
    return given if isinstance(given, str) else msgspec.json.encode(given or {}).decode()


class FunctionTool(Struct, frozen=True):
    """A function the model may call; `parameters` is a JSON Schema."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = {}
    is_strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, which chat templates render.

        Some templates fail if a description or parameters are missing.
        """
        parameters = self.parameters or {"type": "object", "properties": {}}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


class ToolMode(StrEnum):
    """Tool choice: whether the model may, must not or must call tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"
    NAMED = "named"


class ToolPolicy(Struct, frozen=True):
    """Tools of a request, and how the model may use them. `name` is the tool to call if the mode is NAMED."""

    tools: tuple[FunctionTool, ...] = ()
    choice: ToolMode = ToolMode.AUTO
    name: str = ""
    is_parallel: bool = True

    @property
    def offered(self) -> tuple[FunctionTool, ...]:
        """Return the tools that the prompt offers to the model. There are none if the model must not call tools."""
        return () if self.choice is ToolMode.NONE else self.tools

    def check(self, param: str) -> "ToolPolicy":
        """Return this policy. Raises `BadRequest` if no model could follow it."""
        names = [tool.name for tool in self.tools]
        if len(names) > TOOLS_MAX:
            raise BadRequest(f"At most {TOOLS_MAX} tools in one request.", param, "invalid_value")
        if self.choice in (ToolMode.REQUIRED, ToolMode.NAMED) and not names:
            raise BadRequest("A tool can only be required when there are tools.", param, "invalid_value")
        if self.choice is ToolMode.NAMED and self.name not in names:
            raise BadRequest(f"There is no tool named {self.name[:100]!r}.", param, "invalid_value")
        return self


class ThinkingBudget(Struct, frozen=True):
    """Thinking effort and budget (in tokens) of a request. None leaves the choice to the model."""

    is_enabled: bool | None = None
    effort: str = ""
    budget: int | None = None

    @classmethod
    def of_effort(cls, effort: str, param: str) -> "ThinkingBudget":
        """Return the budget for an effort. Raises `BadRequest`."""
        if effort not in EFFORTS:
            raise invalid_choice(effort, EFFORTS, param)
        return cls(is_enabled=bool(EFFORTS[effort]), effort=EFFORTS[effort])

    def over(self, weaker: "ThinkingBudget") -> "ThinkingBudget":
        """Return this budget, with its unset values taken from `weaker`."""
        return ThinkingBudget(
            weaker.is_enabled if self.is_enabled is None else self.is_enabled,
            self.effort or weaker.effort,
            weaker.budget if self.budget is None else self.budget,
        )

    def under(self, default: "ThinkingBudget") -> "ThinkingBudget":
        """Return this budget, with its unset values taken from the configured `default`. If thinking is off, nothing is
        taken.
        """
        return self if self.is_enabled is False else self.over(default)


def with_thinking(prompt: ChatPrompt, thinking: ThinkingBudget) -> ChatPrompt:
    """Add the thinking budget to a prompt."""
    return msgspec.structs.replace(prompt, thinking=thinking.is_enabled, effort=thinking.effort)


def sendable(value: T, param: str) -> T:
    """Return a client's free-form JSON if it can be sent to a worker. Raises `BadRequest`."""
    if not _is_sendable(value):
        raise BadRequest(f"'{param}' is too deep or holds too large a number.", param, "invalid_value")
    return value


def _is_sendable(value: object) -> bool:
    """Whether msgpack can encode a value. It cannot encode numbers beyond 64 bits, lone surrogates or deep nesting."""
    try:
        for _ in range(_SPARE_DEPTH):
            value = [value]
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, UnicodeEncodeError):
        return False
    return True


# Content of a turn: a text, or a list of message parts, which are texts and media in order.
Content = str | list[dict[str, Any]]


def content(parts: Iterable[str | dict[str, Any]], joint: str) -> Content:
    """Return the content of a turn. Consecutive texts are joined by `joint`."""
    shown: list[dict[str, Any]] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        shown += [*_text_part(texts, joint), part]
        texts = []
    return [*shown, *_text_part(texts, joint)] if shown else joint.join(texts)


def _text_part(texts: list[str], joint: str) -> list[dict[str, Any]]:
    text = joint.join(texts)
    return [{"type": "text", "text": text}] if text else []


def only_text(content: Content, where: str) -> str:
    """Return the text of a turn that must not have media. Raises `BadRequest`."""
    if isinstance(content, str):
        return content
    param = next((part["media"].param for part in content if "media" in part), where)
    message = f"'{param}': media belong in messages of the user and in results of tools."
    raise BadRequest(message, param, "invalid_value")


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Content) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, calls: Sequence[Call] = (), reasoning: str | None = None) -> dict[str, Any]:
    """Return a turn of the model, with its reasoning for templates that render it."""
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call)}}
            for call in calls
        ]
    if reasoning:
        turn["reasoning_content"] = reasoning
    return turn


def tool_result(call_id: str, name: str, content: Content) -> dict[str, Any]:
    """Return the result of a tool call as a turn. Some templates need `name`, the name of the called tool."""
    turn = {"role": "tool", "tool_call_id": call_id, "content": content}
    return {**turn, "name": name} if name else turn


def chat_prompt(
    messages: list[dict[str, Any]],
    tool_use: ToolPolicy,
    thinking: ThinkingBudget,
    template_kwargs: dict[str, Any] | None = None,
    continue_final: bool = False,
) -> ChatPrompt:
    """Return the prompt of a request of any dialect. The caller puts `thinking.budget` into the `Generate`."""
    offered, choice = tool_use.offered, tool_use.choice
    messages, media = _numbered(messages)
    return ChatPrompt(
        messages,
        [tool.for_template() for tool in offered],
        template_kwargs or {},
        continue_final,
        thinking.is_enabled,
        thinking.effort,
        must_call=choice in (ToolMode.REQUIRED, ToolMode.NAMED),
        callable_tools=(tool_use.name,) if choice is ToolMode.NAMED else (),
        # If a tool is named, only one call of it is allowed, as in OpenAI's API.
        one_call=bool(offered) and (choice is ToolMode.NAMED or not tool_use.is_parallel),
        strict_tools=tuple(tool.name for tool in offered if tool.is_strict),
        media=media,
    )


def _numbered(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], tuple[Media, ...]]:
    """Return the messages, with each medium replaced by its index, and the list of media."""
    media: list[Reference] = []

    def number(part: dict[str, Any]) -> dict[str, Any]:
        if "media" not in part:
            return part
        media.append(part["media"])
        return part | {"media": len(media) - 1}

    numbered = [
        turn if isinstance(turn["content"], str) else turn | {"content": [number(part) for part in turn["content"]]}
        for turn in messages
    ]
    return numbered, tuple(media)


def named_results(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the name of the called tool to each tool result that has no name."""
    names = {call["id"]: call["function"]["name"] for turn in messages for call in turn.get("tool_calls", ())}
    return [
        {**turn, "name": names[turn["tool_call_id"]]}
        if turn["role"] == "tool" and "name" not in turn and turn.get("tool_call_id") in names
        else turn
        for turn in messages
    ]


def _arguments(call: Call) -> dict[str, Any]:
    """Return a call's arguments as an object, which templates need. The model's text may not be a JSON object."""
    try:
        decoded = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": call.arguments}
    if not _is_sendable(decoded):
        return {"arguments": call.arguments}
    return decoded if isinstance(decoded, dict) else {"arguments": decoded}
