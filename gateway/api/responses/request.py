"""Request bodies of OpenAI's Responses API. One struct represents items of all types; `type` decides which fields
apply.
"""

from typing import Annotated, Any, ClassVar, Final

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from gateway.api.common.decode import Schema
from gateway.api.common.doc_hints import NULL, TEXT, UNSERVED, case, shape, typed, words
from gateway.api.common.drafts import SparsePrefill, Speculate
from gateway.api.common.extras import ExtrasSpec
from gateway.api.common.prompt_cache import PromptCacheOptions, ignored_options
from gateway.api.common.refused_fields import REFUSED_FIELDS, SAMPLER_FIELDS, constraint_fields
from gateway.api.common.thinking import AnthropicThinking, Budget, ReasoningSpec
from gateway.api.openai.message_part import AUDIO_DATA, AudioData
from gateway.api.openai.request import (
    Effort,
    Penalty,
    RepetitionPenalty,
    Seed,
    Temperature,
    Tokens,
    TopK,
    Unit,
)
from gateway.errors import BadRequest, Unsupported, invalid_choice
from gateway.media.reference import DETAILS

# Any value of these fields is accepted, because they request nothing from a local server.
NO_ACTION: Final = frozenset({"client_metadata", "prompt_cache_retention", "stream_options", "service_tier"})
# Schemas for the OpenAPI document. Tools that only OpenAI has are accepted and left out of the prompt.
TOOL: Final = typed(
    "function",
    "custom",
    "namespace",
    name=TEXT,
    description={"type": ["string", "null"]},
    parameters={"type": ["object", "null"]},
    strict={"type": ["boolean", "null"]},
) | {"required": ["type", "name"]}
TOOL_CHOICE: Final = typed("auto", "none", "required", "any", "function", "custom", "allowed_tools", name=TEXT)


# Completion windows of background responses, in seconds; 0 runs at once.
WINDOWS_S: Final = {"soonest": 0, "2h": 2 * 3600, "8h": 8 * 3600}
ROLES: Final = ("user", "assistant", "system", "developer")
TRUNCATIONS: Final = ("auto", "disabled")
TEXT_PARTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_TEXT: Final = {"type": "string"}
_TEXT_OR_PARTS: Final = {"type": ["string", "array"]}


class ContentPart(Struct, frozen=True, omit_defaults=True):
    """One part of a message, of a tool's output or of a reasoning item."""

    hint: ClassVar = {
        "anyOf": [
            case(("text",), type={"enum": list(TEXT_PARTS)}, text=_TEXT),
            case(("refusal",), type={"const": "refusal"}, refusal=_TEXT),
            case(("image_url",), type={"const": "input_image"}, image_url=_TEXT),
            case(("video_url",), type={"const": "input_video"}, video_url=_TEXT),
            case(("input_audio",), type={"const": "input_audio"}, input_audio=AUDIO_DATA),
            case(("file_data",), type={"const": "input_file"}, file_data=_TEXT),
            case(("file_url",), type={"const": "input_file"}, file_url=_TEXT, file_data=NULL),
        ]
    }

    type: Annotated[str, words(*TEXT_PARTS, "refusal", "input_image", "input_video", "input_audio", "input_file")]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Annotated[str, words(*DETAILS)] | None = None
    file_id: Annotated[Any, UNSERVED] = None
    video_url: str | None = None
    input_audio: AudioData | None = None
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None


class InputItem(Struct, frozen=True, omit_defaults=True):
    """Input item of any type, or output item that is sent back. An item without a type is a message or a reference.

    Input items are also listed to clients, so fields that were not given are left out.
    """

    hint: ClassVar = {
        "anyOf": [
            case(("role", "content"), type={"enum": ["message", None]}, role=_TEXT, content=_TEXT_OR_PARTS),
            case(("id",), type={"enum": ["item_reference", None]}, id=_TEXT),
            case(("type",), type={"enum": ["reasoning", "compaction"]}),
            case(("type", "call_id", "name"), type={"const": "function_call"}, call_id=_TEXT, name=_TEXT),
            case(
                ("type", "call_id", "name", "input"),
                type={"const": "custom_tool_call"},
                call_id=_TEXT,
                name=_TEXT,
                input=_TEXT,
            ),
            case(
                ("type", "call_id", "output"),
                type={"enum": ["function_call_output", "custom_tool_call_output"]},
                call_id=_TEXT,
                output=_TEXT_OR_PARTS,
            ),
        ]
    }

    type: str | None = None
    id: str | None = None
    role: Annotated[str, words(*ROLES)] | None = None
    content: str | list[ContentPart] | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | dict[str, Any] | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | UnsetType | None = UNSET
    encrypted_content: str | None = None

    @property
    def kind(self) -> str:
        """Type of the item. If the client left it out, it is derived from the item's fields."""
        if self.type is not None:
            return self.type
        return "item_reference" if self.role is None and self.content is None else "message"


class SummarizedReasoning(ReasoningSpec, frozen=True):
    """Reasoning with fields for a summary, which are ignored: reasoning is sent in full."""

    summary: str | None = None
    generate_summary: str | None = None


class TextFormat(Struct, frozen=True):
    type: Annotated[str, words("text", "json_object", "json_schema")]
    name: str | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    strict: bool | UnsetType | None = UNSET


class TextSpec(Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class InputTokensRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/responses/input_tokens`: the part of a request that is the prompt."""

    hint: ClassVar = {
        "anyOf": [
            case(("input",), input={"type": ["string", "array"], "minItems": 1}),
            case(("previous_response_id",), previous_response_id=_TEXT),
        ]
    }

    model: str = ""
    input: str | list[InputItem] | None = None
    instructions: str | list[InputItem] | None = None
    previous_response_id: str | None = None
    conversation: Annotated[Any, UNSERVED] = None
    prompt: Annotated[Any, UNSERVED] = None
    tools: list[Annotated[dict[str, Any], shape(TOOL)]] | None = None
    tool_choice: (
        Annotated[str, words("auto", "none", "required", "any")] | Annotated[dict[str, Any], shape(TOOL_CHOICE)] | None
    ) = None
    parallel_tool_calls: bool | None = None
    reasoning: SummarizedReasoning | None = None
    text: TextSpec | None = None
    truncation: Annotated[str, words(*TRUNCATIONS)] | None = None
    # Chat completions, and other servers, use these fields for the effort.
    reasoning_effort: Effort | None = None
    thinking: AnthropicThinking | None = None
    enable_thinking: bool | None = None
    thinking_budget: Budget | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def items(self) -> list[InputItem]:
        """Return the input as items."""
        if isinstance(self.input, str):
            return [InputItem("message", role="user", content=[ContentPart("input_text", self.input)])]
        return self.input or []


class BackgroundOptions(Struct, frozen=True):
    """Options of a background response. One with a window of hours runs while nothing else does, as those of batches
    do; it fails if its time is over before.
    """

    completion_window: Annotated[str, words(*WINDOWS_S)] | None = None
    continuation_id: Annotated[Any, UNSERVED] = None


class ResponsesRequest(InputTokensRequest, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`. The fields after `user` come from other servers."""

    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    background_options: BackgroundOptions | None = None
    # If false, the prompt is processed and kept for the next request, and nothing is generated.
    generate: bool | None = None
    include: list[str] | None = None
    max_output_tokens: Tokens | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    temperature: Temperature | None = None
    top_p: Unit | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    top_k: TopK | None = None
    min_p: Unit | None = None
    seed: Seed | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    # These fields are mlxd's own.
    speculate: Speculate | None = None
    sparse_prefill: SparsePrefill | None = None
    x_mlxd: ExtrasSpec | None = None

    @property
    def comparison_id(self) -> str:
        """Id of the response to compare with, or empty."""
        return (self.prompt_cache_options and self.prompt_cache_options.comparison_response_id) or ""

    @property
    def window_s(self) -> int:
        """Seconds within which a response that runs while nothing else does must end; 0 for all other responses."""
        options = self.background_options
        return 0 if options is None else WINDOWS_S.get(options.completion_window or "", 0)

    def includes(self, what: str) -> bool:
        """Whether `include` contains `what`."""
        return what in (self.include or ())


_REFUSED: Final = REFUSED_FIELDS | SAMPLER_FIELDS | constraint_fields("text.format", "max_output_tokens")

_responses = Schema(ResponsesRequest, NO_ACTION, "input", InputItem, refused=_REFUSED)
# Fields of a message that creates a response on a WebSocket, apart from those of a body.
_create = Schema(ResponsesRequest, NO_ACTION | {"type", "stream_id"}, "input", InputItem, refused=_REFUSED)
_count = Schema(InputTokensRequest, NO_ACTION | frozenset(ResponsesRequest.__struct_fields__), "input", InputItem)


def decode_responses(body: bytes) -> tuple[ResponsesRequest, list[str]]:
    """Return the request, and the names of the fields that are unknown or have no effect. Raises `BadRequest`."""
    request, unknown = _responses.decode(body)
    unknown = unknown + ignored_options(request.prompt_cache_options)
    if request.background and request.generate is False:
        raise BadRequest("A response with 'generate: false' has nothing to do in the background.", "generate")
    if request.background and request.store is False:
        raise BadRequest("'background' needs 'store': a response is found by its id.", "background", "invalid_value")
    _check_background_options(request)
    _refuse_unserved(request)
    return request, unknown


def decode_create(message: bytes) -> tuple[ResponsesRequest, list[str]]:
    """Return the request of a message on a WebSocket, as `decode_responses` does of a body. Raises `BadRequest`."""
    request, unknown = _create.decode(message)
    if request.background:
        raise Unsupported("'background' is not supported on a WebSocket: use POST /v1/responses.", "background")
    _check_background_options(request)
    if request.stream is False:
        raise BadRequest("A WebSocket has streams only: leave 'stream' out.", "stream", "invalid_value")
    _refuse_unserved(request)
    return replace(request, stream=True), unknown


def decode_count(body: bytes) -> tuple[InputTokensRequest, list[str]]:
    """Return the request whose tokens are to be counted, and the names of ignored fields. Raises `BadRequest`.

    All fields that a request for a response may have are accepted.
    """
    request, unknown = _count.decode(body)
    _refuse_unserved(request)
    # All tokens of the prompt are counted, so `truncation` has no effect.
    return request, [*unknown, "truncation"] if request.truncation == "auto" else unknown


def _check_background_options(request: ResponsesRequest) -> None:
    options = request.background_options
    if options is None:
        return
    if options.continuation_id is not None:
        message = "'background_options.continuation_id' is not supported: leave it out."
        raise Unsupported(message, "background_options.continuation_id")
    window, where = options.completion_window, "background_options.completion_window"
    if window is not None and window not in WINDOWS_S:
        raise invalid_choice(window, WINDOWS_S, where)
    if request.window_s and (not request.background or request.stream):
        message = f"'{where}' of {window} needs 'background: true', and no 'stream'."
        raise BadRequest(message, where, "invalid_value")


def _refuse_unserved(request: InputTokensRequest) -> None:
    if request.conversation is not None:
        raise Unsupported("'conversation' is not supported: use 'previous_response_id'.", "conversation")
    if request.prompt is not None:
        raise Unsupported("'prompt' is not supported: there are no stored prompts here.", "prompt")
    if request.truncation is not None and request.truncation not in TRUNCATIONS:
        raise invalid_choice(request.truncation, TRUNCATIONS, "truncation")
