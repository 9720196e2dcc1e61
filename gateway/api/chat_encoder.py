"""Canonical events as OpenAI chat chunks, and folded into one chat completion."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, assert_never

import msgspec
from msgspec import UNSET

from gateway.errors import ApiError, openai_body
from gateway.schemas.openai_out import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ContentLogprob,
    FunctionBody,
    ToolCall,
    UsageBody,
    chat_logprobs,
    finish_reason,
    sum_usage,
)
from protocol.messages import Delta, Finish, Kind, Tool, Usage

DONE: Final = b"data: [DONE]\n\n"

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Heading:
    """What every chunk and the whole answer say alike. `is_legacy`: calls have the shape of the time before tools."""

    id: str
    created: int
    model: str
    choices: int
    choices_per_prompt: int = 1
    is_legacy: bool = False

    def reason(self, finish: Finish) -> str:
        return "function_call" if self.is_legacy and finish is Finish.TOOL_CALLS else finish_reason(finish)


class ChatStream:
    """A `StreamEncoder`. The common chunk, a piece of text, is a prebuilt prefix and suffix around the encoded text."""

    def __init__(self, heading: Heading, include_usage: bool) -> None:
        self._heading = heading
        self._include_usage = include_usage
        self._usages: dict[int, Usage] = {}
        self._choices: dict[int, int] = {}
        # rid -> the bytes before a piece of text; the bytes after it are the same for all.
        self._content: dict[int, bytes] = {}
        self._content_end = b""

    def bind(self, rids: Sequence[int]) -> None:
        self._choices = {rid: index for index, rid in enumerate(rids)}
        for rid, index in self._choices.items():
            event = self._event(ChatChunkChoice(index, ChatDelta(content="")))
            # Quotes inside a string are escaped, so this can only be the key itself.
            head, key, tail = event.partition(b'"content":""')
            self._content[rid] = head + key[:-2]
            self._content_end = tail

    def begin(self, prompt_tokens: int) -> bytes:
        opening = ChatDelta(role="assistant", content="", refusal=None)
        return b"".join(self._event(ChatChunkChoice(index, opening)) for index in range(self._heading.choices))

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            if delta.kind is Kind.TEXT and delta.finish is None and delta.logprobs is None:
                if delta.text:
                    parts += (self._content[delta.rid], _encode(delta.text), self._content_end)
            else:
                parts.append(self._encode_any(delta))
        return b"".join(parts)

    def keepalive(self) -> bytes:
        return self._event(ChatChunkChoice(0, ChatDelta(content="")))

    def error(self, error: ApiError) -> bytes:
        return b"data: " + openai_body(error) + b"\n\n"

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        ordered = [self._usages[rid] for rid in self._choices if rid in self._usages]
        return self._chunk([], sum_usage(ordered, self._heading.choices_per_prompt)) + DONE

    def _encode_any(self, delta: Delta) -> bytes:
        index = self._choices[delta.rid]
        logprobs = None if delta.logprobs is None else ChatLogprobs(chat_logprobs(delta.logprobs))
        piece = _piece(delta, self._heading.is_legacy)
        if piece is None and logprobs is not None:
            # The text is held back, or there is none: the log-probabilities are not.
            piece = ChatDelta(content="")
        events = b"" if piece is None else self._event(ChatChunkChoice(index, piece, logprobs))
        if delta.finish is not None:
            if delta.usage is not None:
                self._usages[delta.rid] = delta.usage
            events += self._event(ChatChunkChoice(index, ChatDelta(), finish_reason=self._heading.reason(delta.finish)))
        return events

    def _event(self, choice: ChatChunkChoice) -> bytes:
        return self._chunk([choice], None)

    def _chunk(self, choices: list[ChatChunkChoice], usage: UsageBody | None) -> bytes:
        heading = self._heading
        shown = usage if self._include_usage else UNSET
        return b"data: " + _encode(ChatChunk(heading.id, heading.created, heading.model, choices, shown)) + b"\n\n"


def _piece(delta: Delta, is_legacy: bool) -> ChatDelta | None:
    """What of a message this delta adds; None for what clients are not told."""
    match delta.kind:
        case Kind.TEXT:
            return ChatDelta(content=delta.text) if delta.text else None
        case Kind.REASONING:
            return ChatDelta(reasoning_content=delta.text, reasoning=delta.text) if delta.text else None
        case Kind.TOOL_BEGIN:
            tool = _tool(delta)
            # The name goes out once: clients concatenate what they get.
            function = FunctionBody(name=tool.name, arguments="")
            if is_legacy:
                return ChatDelta(function_call=function)
            return ChatDelta(tool_calls=[ToolCall(tool.index, tool.call_id, "function", function)])
        case Kind.TOOL_ARGS:
            function = FunctionBody(arguments=delta.text)
            if is_legacy:
                return ChatDelta(function_call=function)
            return ChatDelta(tool_calls=[ToolCall(_tool(delta).index, function=function)])
        case Kind.TOOL_END:
            return None
        case _:
            assert_never(delta.kind)


def _tool(delta: Delta) -> Tool:
    assert delta.tool is not None, "a tool delta names its tool"
    return delta.tool


# -- one answer ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class _Choice:
    """One choice so far. Owned by its `ChatFold`."""

    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, _Call] = field(default_factory=dict[int, _Call])
    logprobs: list[ContentLogprob] | None = None
    finish: str = "stop"
    usage: Usage | None = None


class ChatFold:
    """A `Fold`: what `ChatStream` would have sent, in one piece."""

    def __init__(self, heading: Heading) -> None:
        self._heading = heading
        self._choices: dict[int, _Choice] = {}

    def bind(self, rids: Sequence[int]) -> None:
        self._choices = {rid: _Choice() for rid in rids}

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            choice = self._choices[delta.rid]
            if delta.logprobs is not None:
                choice.logprobs = choice.logprobs if choice.logprobs is not None else []
                choice.logprobs += chat_logprobs(delta.logprobs)
            match delta.kind:
                case Kind.TEXT:
                    choice.content.append(delta.text)
                case Kind.REASONING:
                    choice.reasoning.append(delta.text)
                case Kind.TOOL_BEGIN:
                    tool = _tool(delta)
                    choice.calls[tool.index] = _Call(tool.call_id, tool.name)
                case Kind.TOOL_ARGS:
                    choice.calls[_tool(delta).index].arguments.append(delta.text)
                case Kind.TOOL_END:
                    pass
                case _:
                    assert_never(delta.kind)
            if delta.finish is not None:
                choice.finish = self._heading.reason(delta.finish)
                choice.usage = delta.usage

    def result(self) -> bytes:
        heading = self._heading
        choices = [
            ChatChoice(
                index,
                _message(choice, heading.is_legacy),
                None if choice.logprobs is None else ChatLogprobs(choice.logprobs),
                choice.finish,
            )
            for index, choice in enumerate(self._choices.values())
        ]
        usages = [choice.usage for choice in self._choices.values() if choice.usage is not None]
        usage = sum_usage(usages, heading.choices_per_prompt)
        return _encode(ChatCompletion(heading.id, heading.created, heading.model, choices, usage))


def _message(choice: _Choice, is_legacy: bool) -> ChatMessage:
    content = "".join(choice.content)
    reasoning = "".join(choice.reasoning) or UNSET
    calls = [
        ToolCall(id=call.id, type="function", function=FunctionBody(call.name, "".join(call.arguments)))
        for call in choice.calls.values()
    ]
    return ChatMessage(
        content if content or not calls else None,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=calls if calls and not is_legacy else UNSET,
        function_call=calls[0].function if calls and is_legacy else UNSET,
    )
