"""`POST /v1/chat/completions` and `POST /v1/completions`: the canonical events as chunks, or folded into one answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from msgspec import UNSET, Struct
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from gateway.api.common import serve
from gateway.api.common.request_fields import extras_of
from gateway.api.openai.choices import ChoiceFold, ChoiceStream, Heading, Partial
from gateway.api.openai.lowering import lower_chat, lower_completion
from gateway.api.openai.request import decode_chat, decode_completion
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
    TextChoice,
    TextCompletion,
    TextLogprobsBuilder,
    TextLogprobsParts,
    ToolCall,
    chat_logprobs,
    event,
    finish_reason,
)
from gateway.request.record import record_of
from gateway.services import Services
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

    def _add(self, choice: _PartialChat, delta: Delta) -> None:
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


class ChatCompletions:
    """ASGI endpoint of chat completions, streamed or whole."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, decode_chat)
        is_stream, choices = bool(request.stream), request.n or 1
        model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown, choices)
        job = await serve.prepare(
            services, record, model, lambda next_rid, ms: lower_chat(request, model, next_rid, seed, ms)
        )
        record.answer_id = serve.new_id("chatcmpl")
        heading = Heading(
            record.answer_id,
            serve.now(),
            model.full_name,
            choices,
            choices,
            is_legacy=bool(request.functions),
            sends_ids=bool(request.return_token_ids),
            extras=extras_of(request.x_mlxd, record),
        )
        if request.stream:
            encoder = ChatStream(heading, request.wants_usage)
            on_progress = encoder.progress if request.return_progress else None
            await job.stream(encoder, receive, send, on_progress=on_progress)
        else:
            await job.whole(ChatFold(heading), receive, send)


class TextStream(ChoiceStream[TextChoice]):
    """Encoder of a completion stream, in which deltas of every kind are sent as text."""

    def __init__(self, heading: Heading, include_usage: bool) -> None:
        super().__init__(heading, include_usage, TextCompletion, "text")
        self._builders: dict[int, TextLogprobsBuilder] = {}

    def _blank(self, index: int) -> TextChoice:
        return TextChoice(index, "")

    def _choice_for(self, index: int, delta: Delta) -> TextChoice | None:
        if delta.logprobs is None:
            return TextChoice(index, delta.text) if delta.text else None
        builder = self._builders.setdefault(index, TextLogprobsBuilder())
        return TextChoice(index, delta.text, builder.build(delta.text, delta.logprobs))

    def _opened(self, index: int, ids: Sequence[int]) -> bytes:
        return self._event(TextChoice(index, "", token_ids=(), prompt_token_ids=ids))

    def _ended(self, index: int, finish: Finish) -> TextChoice:
        return TextChoice(index, "", finish_reason=_completion_reason(finish))


@dataclass(slots=True)
class _PartialText(Partial):
    text: list[str] = field(default_factory=list[str])
    logprobs: TextLogprobsParts | None = None


class TextFold(ChoiceFold[TextChoice, _PartialText]):
    """`Fold` of a whole text completion, with the same content as `TextStream`."""

    def __init__(self, heading: Heading) -> None:
        super().__init__(heading, TextCompletion, _PartialText)

    def _add(self, choice: _PartialText, delta: Delta) -> None:
        choice.text.append(delta.text)
        if delta.logprobs is not None:
            choice.logprobs = choice.logprobs or TextLogprobsParts()
            choice.logprobs.add(delta.text, delta.logprobs)

    def _whole(self, index: int, choice: _PartialText) -> TextChoice:
        logprobs = None if choice.logprobs is None else choice.logprobs.whole()
        reason, ids = _completion_reason(choice.finish), self._ids_of(choice)
        return TextChoice(index, "".join(choice.text), logprobs, reason, ids, *self._prompt_of(index))


def _completion_reason(finish: Finish) -> str:
    # Text completions have no tools.
    return "stop" if finish is Finish.TOOL_CALLS else finish_reason(finish)


class Completions:
    """ASGI endpoint of text completions, streamed or whole."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, record = self._services, record_of(scope)
        request, unknown = await serve.read(services, record, scope, receive, decode_completion)
        is_stream, sequences = bool(request.stream), request.sequences
        model, seed = serve.begin(services, record, request.model, is_stream, request.seed, unknown, sequences)
        job = await serve.prepare(
            services,
            record,
            model,
            lambda next_rid, ms: lower_completion(request, model, next_rid, seed, ms),
            repeats=request.n or 1,
        )
        record.answer_id = serve.new_id("cmpl")
        heading = Heading(
            record.answer_id,
            serve.now(),
            model.full_name,
            len(job.generates),
            request.n or 1,
            sends_ids=bool(request.return_token_ids),
            extras=extras_of(request.x_mlxd, record),
        )
        if request.stream:
            encoder = TextStream(heading, request.wants_usage)
            on_progress = encoder.progress if request.return_progress else None
            await job.stream(encoder, receive, send, on_progress=on_progress)
        else:
            await job.whole(TextFold(heading), receive, send)
