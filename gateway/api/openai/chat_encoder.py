"""OpenAI chat completions: the canonical events encoded as chunks, or folded into one answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from msgspec import UNSET, Struct
from msgspec.structs import replace

from gateway.api.openai.choices import ChoiceFold, ChoiceStream, Heading, Partial
from gateway.api.openai.events import event
from gateway.api.openai.response import (
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
    chat_logprobs,
    finish_reason,
)
from protocol.from_worker import Delta, DeltaKind, Finish, ToolCallDelta


class ChatStream(ChoiceStream[ChatChunkChoice]):
    """Encoder of a chat stream, with one chunk for each event."""

    def __init__(self, heading: Heading, include_usage: bool) -> None:
        super().__init__(heading, include_usage, ChatChunk, "content")
        # Choices whose first chunk is not sent yet, because it needs the token ids of the prompt.
        self._unopened = set(range(heading.choices)) if heading.sends_ids else set[int]()

    def begin(self, prompt_tokens: int) -> bytes:
        if self._heading.sends_ids:
            return b""
        return b"".join(self._event(_opening(index)) for index in range(self._heading.choices))

    def keepalive(self) -> bytes:
        return super().keepalive() if self._unopened else self._event(self._blank(0))

    def _opened(self, index: int, ids: Sequence[int]) -> bytes:
        self._unopened.discard(index)
        heading = self._heading
        usage = None if self._include_usage else UNSET
        choices = [_opening(index)]
        return event(ChatChunk(heading.id, heading.created, heading.model, choices, usage, prompt_token_ids=ids))

    def _blank(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(content=""))

    def _choice_for(self, index: int, delta: Delta) -> ChatChunkChoice | None:
        piece = _piece(delta, self._heading.is_legacy)
        if delta.logprobs is None:
            return None if piece is None else ChatChunkChoice(index, piece)
        # Log-probabilities are sent even while their text is held back or empty.
        return ChatChunkChoice(index, piece or ChatDelta(content=""), ChatLogprobs(chat_logprobs(delta.logprobs)))

    def _ended(self, index: int, finish: Finish) -> ChatChunkChoice:
        return ChatChunkChoice(index, ChatDelta(), finish_reason=_reason(finish, self._heading))


def _reason(finish: Finish, heading: Heading) -> str:
    return "function_call" if heading.is_legacy and finish is Finish.TOOL_CALLS else finish_reason(finish)


def _piece(delta: Delta, is_legacy: bool) -> ChatDelta | None:
    """Return the message fields for a delta; None for a delta that clients do not get."""
    match delta.kind:
        case DeltaKind.TEXT:
            return ChatDelta(content=delta.text) if delta.text else None
        case DeltaKind.REASONING:
            return ChatDelta(reasoning_content=delta.text, reasoning=delta.text) if delta.text else None
        case DeltaKind.TOOL_BEGIN:
            tool = _tool(delta)
            # The name is sent once, because clients concatenate the pieces.
            function = FunctionBody(name=tool.name, arguments="")
            if is_legacy:
                return ChatDelta(function_call=function)
            return ChatDelta(tool_calls=[ToolCall(tool.index, tool.call_id, "function", function)])
        case DeltaKind.TOOL_ARGS:
            function = FunctionBody(arguments=delta.text)
            if is_legacy:
                return ChatDelta(function_call=function)
            return ChatDelta(tool_calls=[ToolCall(_tool(delta).index, function=function)])
        case DeltaKind.TOOL_END:
            return None
        case _:
            assert_never(delta.kind)


def _tool(delta: Delta) -> ToolCallDelta:
    assert delta.tool is not None, "a tool delta names its tool"
    return delta.tool


@dataclass(slots=True)
class _ChoiceCall:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class _PartialChat(Partial):
    content: list[str] = field(default_factory=list[str])
    reasoning: list[str] = field(default_factory=list[str])
    calls: dict[int, _ChoiceCall] = field(default_factory=dict[int, _ChoiceCall])
    logprobs: list[ContentLogprob] | None = None


class ChatFold(ChoiceFold[ChatChoice, _PartialChat]):
    """`Fold` of a whole chat completion, with the same content as `ChatStream`."""

    def __init__(self, heading: Heading) -> None:
        super().__init__(heading, ChatCompletion, _PartialChat)

    def _take(self, choice: _PartialChat, delta: Delta) -> None:
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs if choice.logprobs is not None else []
            choice.logprobs += chat_logprobs(delta.logprobs)
        match delta.kind:
            case DeltaKind.TEXT:
                choice.content.append(delta.text)
            case DeltaKind.REASONING:
                choice.reasoning.append(delta.text)
            case DeltaKind.TOOL_BEGIN:
                tool = _tool(delta)
                choice.calls[tool.index] = _ChoiceCall(tool.call_id, tool.name)
            case DeltaKind.TOOL_ARGS:
                choice.calls[_tool(delta).index].arguments.append(delta.text)
            case DeltaKind.TOOL_END:
                pass
            case _:
                assert_never(delta.kind)

    def _whole(self, index: int, choice: _PartialChat) -> ChatChoice:
        logprobs = None if choice.logprobs is None else ChatLogprobs(choice.logprobs)
        message = _message(choice, self._heading.is_legacy)
        return ChatChoice(index, message, logprobs, _reason(choice.finish, self._heading), self._ids_of(choice))

    def _answer(self, answer: Struct) -> Struct:
        logprobs, ids = self._prompt_of(0)
        return replace(answer, prompt_logprobs=logprobs, prompt_token_ids=ids)


def _opening(index: int) -> ChatChunkChoice:
    return ChatChunkChoice(index, ChatDelta(role="assistant", content="", refusal=None))


def _message(choice: _PartialChat, is_legacy: bool) -> ChatMessage:
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
