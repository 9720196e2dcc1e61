"""Answers of Anthropic's Messages API: bodies, stream events and errors. A struct's tag is its `type`.

Anthropic's messages: the canonical events encoded as stream events, or folded into one message.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, assert_never

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.api.common.request_fields import Extras, MakeExtras, no_extras
from gateway.errors import ApiError
from protocol.from_worker import Delta, DeltaKind, Finish, Usage

STOP_REASONS: Final = {
    Finish.STOP: "end_turn",
    Finish.LENGTH: "max_tokens",
    Finish.TOOL_CALLS: "tool_use",
}
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    421: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class OutputDetails(Struct, frozen=True):
    thinking_tokens: int = 0


class AnthropicUsage(Struct, frozen=True):
    """Usage of a request.

    `input_tokens` excludes tokens read from the cache; `kept_input_tokens`, mlxd's own field, counts all tokens that a
    sparse prefill kept.
    """

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens_details: OutputDetails = OutputDetails()
    kept_input_tokens: int | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> "AnthropicUsage":
        details = OutputDetails(usage.reasoning)
        return cls(usage.prompt - usage.cached, usage.completion, 0, usage.cached, details, usage.kept or UNSET)


class TextBlock(Struct, frozen=True, tag="text"):
    text: str


class ThinkingBlock(Struct, frozen=True, tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, frozen=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Content = TextBlock | ThinkingBlock | ToolUseBlock


class CacheMissReason(Struct, frozen=True):
    """Why the prompt of the compared request was not a prefix. `detail`, mlxd's own field, has it in plain words."""

    type: str
    cache_missed_input_tokens: int | UnsetType = UNSET
    detail: str | UnsetType = UNSET


class AnthropicDiagnostics(Struct, frozen=True):
    """Result of a comparison; None while it is not known."""

    cache_miss_reason: CacheMissReason | None


Diagnostics = AnthropicDiagnostics | UnsetType | None


class AnthropicMessage(Struct, frozen=True, tag="message"):
    id: str
    role: str
    model: str
    content: list[Content]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage
    diagnostics: Diagnostics = UNSET
    x_mlxd: Extras = UNSET


class MessageStart(Struct, frozen=True, tag="message_start"):
    message: AnthropicMessage


class BlockStart(Struct, frozen=True, tag="content_block_start"):
    index: int
    content_block: Content


class TextBlockDelta(Struct, frozen=True, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, frozen=True, tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, frozen=True, tag="content_block_delta"):
    index: int
    delta: TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(Struct, frozen=True, tag="content_block_stop"):
    index: int


class MessageEnd(Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag="message_delta"):
    delta: MessageEnd
    usage: AnthropicUsage
    x_mlxd: Extras = UNSET


class MessageStop(Struct, frozen=True, tag="message_stop"):
    pass


class PingEvent(Struct, frozen=True, tag="ping"):
    pass


class AnthropicErrorDetail(Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(Struct, frozen=True, tag="error", omit_defaults=True):
    error: AnthropicErrorDetail
    request_id: str | UnsetType = UNSET


class AnthropicTokenCount(Struct, frozen=True):
    input_tokens: int


Event = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | PingEvent | AnthropicErrorBody


def event_name(event: Event) -> str:
    tag = type(event).__struct_config__.tag
    assert isinstance(tag, str)
    return tag


def anthropic_body(error: ApiError, request_id: str) -> bytes:
    """Return the JSON body of an error answer."""
    return msgspec.json.encode(msgspec.structs.replace(error_body(error), request_id=request_id))


def error_body(error: ApiError) -> AnthropicErrorBody:
    """Return the data of an `error` event, which is sent within a stream."""
    message = error.message
    if error.code == "context_length_exceeded" and len(error.numbers) == 2:
        # Claude Code recognises this text, and offers to compact the conversation.
        message = f"prompt is too long: {error.numbers[0]} tokens > {error.numbers[1]} maximum"
    return AnthropicErrorBody(AnthropicErrorDetail(_ERROR_TYPES.get(error.status, "api_error"), message))


_encode = msgspec.json.Encoder().encode
_EMPTY: Final = Usage(0, 0, 0)


@dataclass(frozen=True, slots=True)
class MessageAdditions:
    """Functions for the fields of a message that its request asks for."""

    diagnostics: Callable[[], Diagnostics] = lambda: UNSET
    extras: MakeExtras = no_extras


NO_ADDITIONS: Final = MessageAdditions()


class MessageStream:
    """`StreamEncoder` of one sequence. The answer consists of content blocks, each of which is opened, filled and
    closed.
    """

    def __init__(self, message_id: str, model: str, additions: MessageAdditions = NO_ADDITIONS) -> None:
        self._id = message_id
        self._model = model
        self._additions = additions
        self._blocks = 0
        self._open: DeltaKind | None = None
        self._thought = hashlib.blake2b(digest_size=32)
        self._ending = MessageEnd("end_turn", None)
        self._usage = _EMPTY

    def bind(self, rids: Sequence[int]) -> None:
        assert len(rids) == 1, "a message is one sequence"

    def begin(self, prompt_tokens: int) -> bytes:
        usage = AnthropicUsage(prompt_tokens, 0)
        message = AnthropicMessage(
            self._id, "assistant", self._model, [], None, None, usage, self._additions.diagnostics()
        )
        return _sse(MessageStart(message))

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        return b"".join([self._delta(delta) for delta in deltas])

    def keepalive(self) -> bytes:
        return _sse(PingEvent())

    def error(self, error: ApiError) -> bytes:
        return _sse(error_body(error))

    def end(self) -> bytes:
        events = self._close()
        if not self._blocks:  # Clients require at least one block.
            events += self._start(DeltaKind.TEXT, TextBlock("")) + self._close()
        last = MessageDelta(self._ending, AnthropicUsage.of(self._usage), self._additions.extras())
        return events + _sse(last) + _sse(MessageStop())

    def _delta(self, delta: Delta) -> bytes:
        events = self._event(delta) if delta.text or delta.kind in (DeltaKind.TOOL_BEGIN, DeltaKind.TOOL_END) else b""
        if delta.finish is not None:
            self._ending = ending(delta)
            self._usage = delta.usage or _EMPTY
        return events

    def _event(self, delta: Delta) -> bytes:
        match delta.kind:
            case DeltaKind.TEXT:
                return self._ensure(DeltaKind.TEXT, TextBlock("")) + self._piece(TextBlockDelta(delta.text))
            case DeltaKind.REASONING:
                self._thought.update(delta.text.encode())
                return self._ensure(DeltaKind.REASONING, ThinkingBlock("")) + self._piece(ThinkingDelta(delta.text))
            case DeltaKind.TOOL_BEGIN:
                assert delta.tool is not None
                return self._close() + self._start(
                    DeltaKind.TOOL_BEGIN, ToolUseBlock(delta.tool.call_id, delta.tool.name, {})
                )
            case DeltaKind.TOOL_ARGS:
                return self._piece(InputJsonDelta(delta.text))
            case DeltaKind.TOOL_END:
                return self._close()
            case _:
                assert_never(delta.kind)

    def _ensure(self, kind: DeltaKind, block: Content) -> bytes:
        return b"" if self._open is kind else self._close() + self._start(kind, block)

    def _start(self, kind: DeltaKind, block: Content) -> bytes:
        self._open = kind
        self._blocks += 1
        return _sse(BlockStart(self._blocks - 1, block))

    def _piece(self, piece: TextBlockDelta | ThinkingDelta | SignatureDelta | InputJsonDelta) -> bytes:
        return _sse(BlockDelta(self._blocks - 1, piece))

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        events = b""
        if self._open is DeltaKind.REASONING:
            events = self._piece(SignatureDelta(signature(self._thought)))
            self._thought = hashlib.blake2b(digest_size=32)
        self._open = None
        return events + _sse(BlockStop(self._blocks - 1))


class MessageFold:
    """`Fold` of one message, with the same content as `MessageStream`."""

    def __init__(self, message_id: str, model: str, additions: MessageAdditions = NO_ADDITIONS) -> None:
        self._id = message_id
        self._model = model
        self._additions = additions
        self._blocks: list[tuple[DeltaKind, list[str], str, str]] = []
        self._ending = MessageEnd("end_turn", None)
        self._usage = _EMPTY

    def bind(self, rids: Sequence[int]) -> None:
        self._blocks.clear()

    def add(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            match delta.kind:
                case DeltaKind.TEXT | DeltaKind.REASONING:
                    if delta.text:
                        self._text(delta)
                case DeltaKind.TOOL_BEGIN:
                    assert delta.tool is not None
                    self._blocks.append((delta.kind, [], delta.tool.call_id, delta.tool.name))
                case DeltaKind.TOOL_ARGS:
                    self._blocks[-1][1].append(delta.text)
                case DeltaKind.TOOL_END:
                    self._blocks.append((delta.kind, [], "", ""))
                case _:
                    assert_never(delta.kind)
            if delta.finish is not None:
                self._ending, self._usage = ending(delta), delta.usage or _EMPTY

    def result(self) -> bytes:
        content = [
            _content(kind, "".join(texts), call_id, name)
            for kind, texts, call_id, name in self._blocks
            if kind is not DeltaKind.TOOL_END
        ]
        return _encode(
            AnthropicMessage(
                self._id,
                "assistant",
                self._model,
                content or [TextBlock("")],
                self._ending.stop_reason,
                self._ending.stop_sequence,
                AnthropicUsage.of(self._usage),
                self._additions.diagnostics(),
                self._additions.extras(),
            )
        )

    def _text(self, delta: Delta) -> None:
        if not self._blocks or self._blocks[-1][0] is not delta.kind:
            self._blocks.append((delta.kind, [], "", ""))
        self._blocks[-1][1].append(delta.text)


def ending(delta: Delta) -> MessageEnd:
    """Return the stop reason and the stop sequence of a message, as Anthropic's API names them."""
    assert delta.finish is not None
    if delta.finish is Finish.STOP and delta.stop:
        return MessageEnd("stop_sequence", delta.stop)
    return MessageEnd(STOP_REASONS.get(delta.finish, "end_turn"), None)


def signature(thought: "hashlib.blake2b") -> str:
    """Return an opaque signature for a thinking block, because the real API sends one; nothing here depends on it."""
    return thought.hexdigest()


def _content(kind: DeltaKind, text: str, call_id: str, name: str) -> Content:
    if kind is DeltaKind.TEXT:
        return TextBlock(text)
    if kind is DeltaKind.REASONING:
        return ThinkingBlock(text, signature(hashlib.blake2b(text.encode(), digest_size=32)))
    try:
        return ToolUseBlock(call_id, name, msgspec.json.decode(text or "{}", type=dict))
    # The input was cut off by max_tokens. A client that collects the stream gets the same incomplete input.
    except msgspec.DecodeError:
        return ToolUseBlock(call_id, name, {})


def _sse(event: Event) -> bytes:
    return b"event: " + event_name(event).encode() + b"\ndata: " + _encode(event) + b"\n\n"
