"""Answers of the Responses API: the response, its items and its stream events. A struct's tag is its `type`."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.api.common.request_fields import Extras
from gateway.api.openai.response import ContentLogprob
from gateway.api.responses.request import InputItem as InputItem
from gateway.errors import ApiError
from protocol.from_worker import Usage


class OutputText(Struct, frozen=True, tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningText(Struct, frozen=True, tag="reasoning_text"):
    text: str


Part = OutputText | ReasoningText


class OutputMessage(Struct, frozen=True, tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningItem(Struct, frozen=True, tag="reasoning"):
    """Reasoning, with `encrypted_content` if the request includes it."""

    id: str
    content: list[ReasoningText]
    summary: tuple[()] = ()
    encrypted_content: str | UnsetType = UNSET


class FunctionCall(Struct, frozen=True, tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCall(Struct, frozen=True, tag="custom_tool_call"):
    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


Item = OutputMessage | ReasoningItem | FunctionCall | CustomToolCall


class InputDetails(Struct, frozen=True):
    """Details of the input tokens. Counts of media and of a sparse prefill are left out if they are 0."""

    cached_tokens: int
    cache_write_tokens: int = 0
    image_tokens: int | UnsetType = UNSET
    video_tokens: int | UnsetType = UNSET
    audio_tokens: int | UnsetType = UNSET
    kept_tokens: int | UnsetType = UNSET

    @classmethod
    def of(cls, usage: Usage) -> "InputDetails":
        counts = (usage.image_tokens, usage.video_tokens, usage.audio_tokens, usage.kept)
        return cls(usage.cached, 0, *(count or UNSET for count in counts))


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "ResponseUsage":
        return cls(
            usage.prompt,
            InputDetails.of(usage),
            usage.completion,
            ReasoningTokens(usage.reasoning),
            usage.prompt + usage.completion,
        )


class ErrorInfo(Struct, frozen=True):
    code: str
    message: str

    @classmethod
    def of(cls, error: ApiError) -> "ErrorInfo":
        """Map an error to a published code, or to one of the additional codes that Codex understands."""
        if error.code == "context_length_exceeded":
            return cls(error.code, error.message)
        if error.status == 429:
            return cls("rate_limit_exceeded", error.message)
        return cls("invalid_prompt" if error.status == 400 else "server_error", error.message)


class ResponseIncomplete(Struct, frozen=True):
    reason: str


class ReasoningEcho(Struct, frozen=True):
    effort: str | None
    summary: str | None


class FormatEcho(Struct, frozen=True):
    """Echo of the request's `text.format`."""

    type: str = "text"
    name: str | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class TextEcho(Struct, frozen=True):
    format: FormatEcho
    verbosity: str = "medium"


class PromptCacheDiagnostics(Struct, frozen=True):
    """Comparison with the prompt of another response: `cache_hit`, `cache_miss`, `comparison_response_not_found` or
    `unavailable`. `detail`, mlxd's own field, has the reason in plain words.
    """

    type: str
    reason: str | UnsetType = UNSET
    cache_missed_tokens: int | UnsetType = UNSET
    comparison_reusable_tokens: int | UnsetType = UNSET
    detail: str | UnsetType = UNSET


class Response(Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """State of a response. `user` is left out if it was not given, because null is not allowed there."""

    id: str
    created_at: int
    status: str = "in_progress"
    background: bool = False
    completed_at: int | None = None
    error: ErrorInfo | None = None
    incomplete_details: ResponseIncomplete | None = None
    instructions: str | list[InputItem] | None = None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: Sequence[Item] = ()
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningEcho
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | UnsetType = UNSET
    metadata: dict[str, Any]
    prompt_cache_diagnostics: PromptCacheDiagnostics | UnsetType = UNSET
    x_mlxd: Extras = UNSET


class DeletedResponse(Struct, frozen=True, tag_field="object", tag="response"):
    id: str
    deleted: bool = True


class CompactedResponse(Struct, frozen=True, tag_field="object", tag="response.compaction"):
    """Compacted conversation: user messages, and an item of type `compaction` in place of the rest."""

    id: str
    created_at: int
    output: list[InputItem]
    usage: ResponseUsage


class InputTokenCount(Struct, frozen=True, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class ItemList(Struct, frozen=True, tag_field="object", tag="list"):
    """A page of input items."""

    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _ResponseEvent(Struct, frozen=True):
    response: Response


class _InItem(Struct, frozen=True):
    item_id: str
    output_index: int


class _InContent(_InItem, frozen=True):
    content_index: int


class ResponseCreated(_ResponseEvent, frozen=True, tag="response.created"):
    """Event: the response exists."""


class ResponseQueued(_ResponseEvent, frozen=True, tag="response.queued"):
    """Event: the background response waits for its start."""


class InProgress(_ResponseEvent, frozen=True, tag="response.in_progress"):
    """Event: the response is being generated."""


class ResponseCompleted(_ResponseEvent, frozen=True, tag="response.completed"):
    """Event: the response has ended."""


class IncompleteEvent(_ResponseEvent, frozen=True, tag="response.incomplete"):
    """Event: the response was cut off or cancelled."""


class ResponseFailed(_ResponseEvent, frozen=True, tag="response.failed"):
    """Event: the response has failed."""


class ItemAdded(Struct, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: Item


class ItemDone(Struct, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: Item


class PartAdded(_InContent, frozen=True, tag="response.content_part.added"):
    part: Part


class PartDone(_InContent, frozen=True, tag="response.content_part.done"):
    part: Part


class OutputTextDelta(_InContent, frozen=True, tag="response.output_text.delta"):
    delta: str
    logprobs: Sequence[ContentLogprob] = ()


class OutputTextDone(_InContent, frozen=True, tag="response.output_text.done"):
    text: str
    logprobs: Sequence[ContentLogprob] = ()


class ReasoningDelta(_InContent, frozen=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_InContent, frozen=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_InItem, frozen=True, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, frozen=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


class CustomInputDelta(_InItem, frozen=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(_InItem, frozen=True, tag="response.custom_tool_call_input.done"):
    input: str


Event = (
    ResponseCreated
    | ResponseQueued
    | InProgress
    | ResponseCompleted
    | IncompleteEvent
    | ResponseFailed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | CustomInputDelta
    | InputDone
)

_encode: Final = msgspec.json.Encoder().encode


def error_bytes(code: str, message: str, sequence_number: int) -> bytes:
    """Encode the event that ends a stream but not its response."""
    fields = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": sequence_number}
    return b"event: error\ndata: %b\n\n" % _encode(fields)


def stream_bytes(events: Iterable[Struct], sequence_number: int) -> tuple[bytes, int]:
    """Encode server-sent events, numbered from `sequence_number`, and return the bytes and the next number."""
    parts: list[bytes] = []
    for event in events:
        tag = str(type(event).__struct_config__.tag).encode()
        parts.append(b'event: %b\ndata: %b,"sequence_number":%d}\n\n' % (tag, _encode(event)[:-1], sequence_number))
        sequence_number += 1
    return b"".join(parts), sequence_number
