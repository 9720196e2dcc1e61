"""Answers of Anthropic's Messages API: bodies, stream events and errors. A struct's tag is its `type`."""

from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.api.common.extras import Extras
from gateway.errors import ApiError
from protocol.from_worker import Finish, Usage

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
