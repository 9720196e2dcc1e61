"""Request bodies of OpenAI's chat and text completions: types, ranges, and refused fields.

Sampling fields beyond OpenAI's, as vLLM, llama.cpp, text-generation-webui and mlx-lm name them.

Part of a message in OpenAI's chats, in the spellings of OpenAI and other servers.
"""

from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct

from gateway.api.common.canonical import EFFORTS, STOP_CHARS_MAX, STOPS_MAX, ToolMode
from gateway.api.common.constraints import FormatFields
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import (
    NAMED,
    NULL,
    REFUSED_FIELDS,
    TEXT,
    UNSERVED,
    ExtrasSpec,
    PromptCacheOptions,
    SparsePrefill,
    Speculate,
    case,
    ignored_options,
    shape,
    typed,
    words,
)
from gateway.api.common.thinking import AnthropicThinking, ReasoningSpec
from gateway.api.openai.response import check_progress
from gateway.errors import BadRequest, Unsupported
from gateway.media.media_reference import DETAILS
from protocol.to_worker import (
    TOKENS_MAX,
    TOP_N_SIGMA_MAX,
    Bias,
    DryBase,
    DryLength,
    DryMultiplier,
    Penalty,
    Probability,
    RepetitionPenalty,
    Temperature,
    TokenCount,
    TypicalP,
)

BREAKERS: Final = ("\n", ":", '"', "*")
_LISTED_MAX: Final = 64
_IDS_MAX: Final = 16_384
_WORD_CHARS_MAX: Final = 256

TokenId = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
Window = Annotated[int, Meta(ge=-1, le=TOKENS_MAX)]
Text = Annotated[str, Meta(max_length=_WORD_CHARS_MAX)]


class SamplerFields(FormatFields, frozen=True, kw_only=True):
    """Fields for formats, token limits and samplers.

    Windows are in tokens; -1 means the whole context. A `repetition_context_size` of 0 means that too, and 0 in the
    other windows turns the sampler off.
    """

    min_tokens: TokenCount | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=_LISTED_MAX)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[Text], Meta(max_length=_LISTED_MAX)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(max_length=_IDS_MAX)] | None = None
    # llama.cpp's and mlx-lm's names of the same penalty window.
    repeat_last_n: Window | None = None
    repetition_context_size: Window | None = None
    typical_p: TypicalP | None = None
    # A negative value, like zero, turns this sampler off.
    top_n_sigma: Annotated[float, Meta(ge=-1, le=TOP_N_SIGMA_MAX)] | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    dry_multiplier: DryMultiplier | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: DryLength | None = None
    dry_penalty_last_n: Window | None = None
    # The value is a list, or the JSON text of a list.
    dry_sequence_breakers: (
        Annotated[list[Text], Meta(max_length=_LISTED_MAX)]
        | Annotated[str, Meta(max_length=_LISTED_MAX * _WORD_CHARS_MAX)]
        | None
    ) = None
    # False keeps special tokens in the text of the output.
    skip_special_tokens: bool | None = None

    @property
    def penalty_window(self) -> int | None:
        """Number of tokens to which penalties apply: 0 means all tokens, and None means none."""
        window = self.repeat_last_n if self.repeat_last_n is not None else self.repetition_context_size
        if self.repeat_last_n == 0:
            return None
        return max(0, window or 0)


def sampler_values(request: SamplerFields) -> dict[str, Any]:
    """Return the values of `protocol.Sampling` for the fields that a request sets. Raises `BadRequest`."""
    named = {
        "min_tokens": request.min_tokens,
        "stop_ids": tuple(request.stop_token_ids or ()) or None,
        "allowed_ids": None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        "bad_words": tuple(word for word in request.bad_words or () if word) or None,
        "penalty_window": request.penalty_window,
        "typical_p": request.typical_p,
        "top_n_sigma": None if request.top_n_sigma is None else max(0.0, request.top_n_sigma),
        "xtc_probability": request.xtc_probability,
        "xtc_threshold": request.xtc_threshold,
    }
    if named["allowed_ids"] == ():
        raise BadRequest("'allowed_token_ids' is empty: no token is left.", "allowed_token_ids", "invalid_value")
    # A window of zero tokens turns DRY off, as in llama.cpp.
    if request.dry_multiplier and request.dry_penalty_last_n != 0:
        named |= {
            "dry_multiplier": request.dry_multiplier,
            "dry_base": request.dry_base,
            "dry_allowed_length": request.dry_allowed_length,
            "dry_window": max(0, request.dry_penalty_last_n or 0),
            "dry_breakers": _breakers(request.dry_sequence_breakers),
        }
    return {name: value for name, value in named.items() if value is not None}


def _breakers(given: list[str] | str | None) -> tuple[str, ...]:
    if given is None:
        return BREAKERS
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=list[str])
        except (msgspec.DecodeError, RecursionError):
            param = "dry_sequence_breakers"
            message = f"Invalid value for '{param}': expected a list of texts."
            raise BadRequest(message, param, "invalid_value") from None
    return tuple(sorted({text for text in given if text}))


TEXT_PARTS: Final = ("text", "input_text", "output_text")
MEDIA_TYPES: Final = (
    *("image_url", "input_image", "image", "video_url", "input_video", "video"),
    *("input_audio", "audio_url", "file"),
)


class MediaLink(Struct, frozen=True):
    """Where a medium is: a data URI, or a URL if the configuration allows URLs. `detail` applies to images."""

    url: str
    detail: Annotated[str, words(*DETAILS)] | None = None


# Schema of `AudioData` in a part that contains audio. Parts of other types may have an empty object there.
AUDIO_DATA: Final = {"type": "object", "properties": {"data": TEXT}, "required": ["data"]}


class AudioData(Struct, frozen=True):
    """Audio in base64. The audio format is detected from the bytes."""

    data: str
    format: str = ""


class FileData(Struct, frozen=True):
    """A PDF, as base64 or as a data URI. Its name is shown to the model."""

    file_data: str | None = None
    filename: str | None = None
    file_id: Annotated[Any, UNSERVED] = None


# Schema of `FileData` in a part that contains a file. Parts of other types may have an empty object there.
_FILE_DATA: Final = {"type": "object", "properties": {"file_data": TEXT}, "required": ["file_data"]}


def _media_case(*types: str, **fields: Any) -> dict[str, Any]:
    return case(tuple(fields), type={"enum": list(types)}, **fields)


_LINKED: Final = {"anyOf": [TEXT, {"type": "object", "properties": {"url": TEXT}, "required": ["url"]}]}


class MessagePart(Struct, frozen=True):
    """One part of a message's content, with OpenAI's fields and those of other servers for media."""

    hint: ClassVar = {
        "anyOf": [
            case(("text",), type={"enum": list(TEXT_PARTS)}, text={"type": "string"}),
            case(("refusal",), type={"const": "refusal"}, refusal={"type": "string"}),
            _media_case("image_url", "input_image", image_url=_LINKED),
            _media_case("image", image=_LINKED),
            _media_case("video_url", video_url=_LINKED),
            _media_case("video", "input_video", video=_LINKED),
            _media_case("audio_url", audio_url=_LINKED),
            _media_case("input_audio", input_audio=AUDIO_DATA),
            _media_case("file", file=_FILE_DATA),
        ]
    }

    type: Annotated[str, words(*TEXT_PARTS, "refusal", *MEDIA_TYPES)]
    text: str | None = None
    refusal: str | None = None
    image_url: str | MediaLink | None = None
    image: str | MediaLink | None = None
    detail: Annotated[str, words(*DETAILS)] | None = None
    video_url: str | MediaLink | None = None
    video: str | MediaLink | None = None
    audio_url: str | MediaLink | None = None
    input_audio: AudioData | None = None
    file: FileData | None = None


ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
PROMPTS_MAX: Final = 4096

# -1 turns the filter off, as 0 does.
TopKOrOff = Annotated[int, Meta(ge=-1, le=TOKENS_MAX)]
BiasText = Annotated[str, Meta(min_length=1, max_length=256), shape(TEXT)]
Choices = Annotated[int, Meta(ge=1, le=16)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
# Maximum tokens of the answer; -1 means no limit but the context's, as in llama.cpp and LM Studio.
TokenLimit = Annotated[int, Meta(ge=-1, le=TOKENS_MAX)]
StopText = Annotated[str, Meta(max_length=STOP_CHARS_MAX)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=STOPS_MAX)]
Effort = Annotated[str, Meta(max_length=32), words(*EFFORTS)]
# A prompt may be one or more texts, or the token ids of one or more prompts.
_ID: Final = {"type": "integer", "minimum": 0, "maximum": (1 << 31) - 1}
_IDS: Final = {"type": "array", "items": _ID, "minItems": 1}
PROMPT_LOGPROBS_MAX: Final = 20
PROMPT_LOGPROBS: Final = {"minimum": 0, "maximum": PROMPT_LOGPROBS_MAX}
PROMPTS: Final = {
    "minItems": 1,
    "maxItems": PROMPTS_MAX,
    "anyOf": [{"items": TEXT}, {"items": _ID}, {"items": _IDS}],
}


class StreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class VideoReading(Struct, frozen=True, forbid_unknown_fields=True):
    """How many frames to take from a video: a number in total, or per second."""

    num_frames: Annotated[int, Meta(ge=1, le=2048)] | None = None
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None


class MediaReading(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `media_io_kwargs`."""

    video: VideoReading | None = None


class Processing(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `mm_processor_kwargs`: limits of an image's pixels, and frames per second of a video."""

    min_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    max_pixels: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    fps: Annotated[float, Meta(gt=0, le=240)] | None = None


class CalledFunction(Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class CallSpec(Struct, frozen=True):
    """A call in an earlier turn."""

    hint: ClassVar = case(("function",), function={"type": "object"})

    id: str = ""
    type: Annotated[str, Meta(max_length=64), words("function")] = "function"
    function: CalledFunction | None = None


_TEXT_OR_PARTS: Final = {"type": ["string", "array"]}


class RequestMessage(Struct, frozen=True):
    hint: ClassVar = {
        "anyOf": [
            case(
                ("content",),
                role={"enum": ["system", "developer", "user"]},
                content=_TEXT_OR_PARTS,
                tool_calls=NULL,
                function_call=NULL,
            ),
            case(role={"const": "assistant"}),
            case(
                ("tool_call_id",),
                role={"const": "tool"},
                tool_call_id={"type": "string"},
                tool_calls=NULL,
                function_call=NULL,
            ),
            case(
                ("name",),
                role={"const": "function"},
                name={"type": "string"},
                tool_calls=NULL,
                function_call=NULL,
            ),
        ]
    }

    role: Annotated[str, words(*ROLES)]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[CallSpec] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    audio: Annotated[Any, UNSERVED] = None
    # If true, the last message, which must be the assistant's, is continued. This field is DeepSeek's and Mistral's.
    prefix: bool | None = None


class SamplingFields(SamplerFields, frozen=True, kw_only=True):
    """Sampling fields of both bodies."""

    # An empty name means the model in `[server] default`, as on all routes.
    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenLimit | None = None
    # llama.cpp's name for the same.
    n_predict: TokenLimit | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: Stop | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_k: TopKOrOff | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    # llama.cpp's and LM Studio's name for the repetition penalty.
    repeat_penalty: RepetitionPenalty | None = None
    # OpenAI's form maps token ids to biases. llama.cpp's form may also name texts, each of whose tokens gets the text's
    # bias.
    logit_bias: dict[str, Bias] | list[tuple[TokenId | BiasText, Bias]] | None = None
    ignore_eos: bool | None = None
    # Requests of a lower priority run first, the timeout is in seconds, and requests with different salts share no
    # cached prefixes. These fields are vLLM's and mlxd's.
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    timeout: Annotated[float, Meta(gt=0, le=7 * 86400)] | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    # Whether tokens are drafted, and the maximum number of tokens in a draft. This field is mlxd's own.
    speculate: Speculate | None = None
    # Whether a long prompt is prefilled sparsely, and the fraction of it that is kept. This field is mlxd's own.
    sparse_prefill: SparsePrefill | None = None
    # What the answer has in addition. This field is mlxd's own.
    x_mlxd: ExtrasSpec | None = None

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens of the answer, -1 for no limit; None if the request does not say."""
        return self.n_predict if self.max_tokens is None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings that are not empty."""
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(text for text in texts if text)

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk that contains the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class PromptFields(SamplingFields, frozen=True, kw_only=True):
    """vLLM's fields about the prompt's tokens, which both bodies have."""

    # A longer prompt is truncated to this number of tokens at its end; -1 keeps as many as fit.
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    # Number of likeliest tokens to return at each position of the prompt, in addition to the prompt's own token.
    prompt_logprobs: Annotated[int, Meta(ge=-1, le=1 << 31), shape(PROMPT_LOGPROBS)] | None = None
    # Whether the answer contains the token ids of the prompt and of the output.
    return_token_ids: bool | None = None
    # Whether a stream has chunks with the progress of the prompt. This is llama.cpp's field.
    return_progress: bool | None = None

    @property
    def scored(self) -> int | None:
        """Number of likeliest tokens at each position of the prompt; None if the answer has no log-probabilities of the
        prompt.
        """
        return None if self.stream else self.prompt_logprobs


class FunctionSpec(Struct, frozen=True):
    name: Annotated[str, shape({"pattern": r"^[a-zA-Z0-9_.:/@$-]{1,128}$"})]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Struct, frozen=True):
    type: Annotated[str, Meta(max_length=64), words("function")] = "function"
    function: FunctionSpec | None = None


TOOL_MODES: Final = {
    "auto": ToolMode.AUTO,
    "none": ToolMode.NONE,
    "required": ToolMode.REQUIRED,
    "any": ToolMode.REQUIRED,
}
# Schema of `allowed_tools` for the API document.
_ALLOWED: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"mode": {"enum": list(TOOL_MODES)}, "tools": {"type": "array", "items": {"type": "object"}}},
}
TOOL_CHOICE: Final = {
    "anyOf": [
        {"enum": list(TOOL_MODES)},
        typed(*TOOL_MODES),
        {**typed("function", function=NAMED), "required": ["type", "function"]},
        {**typed("function", name=TEXT), "required": ["type", "name"]},
        {**typed("allowed_tools", allowed_tools=_ALLOWED), "required": ["type", "allowed_tools"]},
        {**typed("allowed_tools", **_ALLOWED["properties"]), "required": ["type", "tools"]},
        NULL,
    ]
}
FUNCTION_CALL: Final = {"anyOf": [{"enum": ["none", "auto"]}, NAMED, NULL]}


class PredictedPart(Struct, frozen=True):
    """One part of the predicted text."""

    type: Annotated[str, words("text")]
    text: str


class Prediction(Struct, frozen=True):
    """Text that the client expects in a large part of the answer. It changes how long the answer takes, but never a
    token.
    """

    type: Annotated[str, words("content")]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        """Concatenation of the text of all parts."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(PromptFields, frozen=True, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[RequestMessage], Meta(min_length=1)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    # Fields of vLLM and SGLang for templates and thinking.
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    thinking_budget: TokenCount | None = None
    continue_final_message: bool | None = None
    # False means the same as continuing the final message, and is accepted only together with that. This is vLLM's
    # field.
    add_generation_prompt: bool | None = None
    # Fields of other servers for thinking. The module `thinking` decides which of them wins.
    reasoning: ReasoningSpec | None = None
    thinking: AnthropicThinking | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Annotated[Any, shape(TOOL_CHOICE)] = None
    parallel_tool_calls: bool | None = None
    # These older fields of OpenAI were replaced by `tools` and `tool_choice`.
    functions: list[FunctionSpec] | None = None
    function_call: Annotated[Any, shape(FUNCTION_CALL)] = None
    # vLLM's fields for images and video.
    media_io_kwargs: MediaReading | None = None
    mm_processor_kwargs: Processing | None = None
    prediction: Prediction | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    # These fields of OpenAI are accepted only if they ask for text and nothing else.
    modalities: list[Annotated[str, words("text")]] | None = None
    audio: Annotated[Any, UNSERVED] = None
    web_search_options: Annotated[Any, UNSERVED] = None


class CompletionRequest(PromptFields, frozen=True, kw_only=True):
    """`POST /v1/completions`."""

    prompt: Annotated[str, shape(TEXT)] | Annotated[list[str | TokenId | list[TokenId]], shape(PROMPTS)]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    # The text after a gap. It needs a model that was trained to fill in the middle.
    suffix: str | None = None
    # False leaves out the special tokens that the tokenizer adds around a text. This is vLLM's field.
    add_special_tokens: bool | None = None
    # Accepted only for a single choice.
    best_of: Annotated[int, Meta(ge=0, le=1 << 40), shape({"maximum": 1})] | None = None

    @property
    def sequences(self) -> int:
        """Number of sequences that the request generates."""
        is_one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return (1 if is_one else len(self.prompt)) * (self.n or 1)


# Any value of these fields is accepted, because they request nothing from a local server.
NO_ACTION: Final = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
    }
)
MESSAGE_NO_ACTION: Final = frozenset({"annotations", "id", "cache_control", "reasoning_details"})

MESSAGE_FIELDS: Final = frozenset(RequestMessage.__struct_fields__) | MESSAGE_NO_ACTION

_chat = Schema(ChatCompletionRequest, NO_ACTION, "messages", RequestMessage, MESSAGE_FIELDS, REFUSED_FIELDS)
_completion = Schema(CompletionRequest, NO_ACTION, refused=REFUSED_FIELDS)


def decode_chat(body: bytes) -> tuple[ChatCompletionRequest, list[str]]:
    """Decode a chat request. Returns it with the names of unknown fields. Raises `BadRequest`."""
    request, unknown = _chat.decode(body)
    _refuse_unserved_chat(request)
    unknown = unknown + ignored_options(request.prompt_cache_options, "comparison_response_id")
    return request, unknown + _ignored(request)


def decode_completion(body: bytes) -> tuple[CompletionRequest, list[str]]:
    """Decode a completion request. Returns it with the names of unknown fields. Raises `BadRequest`."""
    request, unknown = _completion.decode(body)
    if request.suffix and request.echo:
        raise Unsupported("'echo' together with 'suffix' is not supported.", "echo")
    if request.suffix and request.truncate_prompt_tokens:
        message = "'truncate_prompt_tokens' together with 'suffix' is not supported."
        raise Unsupported(message, "truncate_prompt_tokens")
    if request.suffix and request.add_special_tokens is False:
        message = "'add_special_tokens': false together with 'suffix' is not supported."
        raise Unsupported(message, "add_special_tokens")
    if request.best_of is not None and request.best_of > (request.n or 1):
        raise Unsupported("'best_of' greater than 'n' is not supported.", "best_of")
    return request, unknown + _ignored(request)


def _ignored(request: PromptFields) -> list[str]:
    """Return the known fields that have no effect.

    Raises `BadRequest` if `prompt_logprobs` exceeds vLLM's default limit, or is set for a stream, and if progress is
    requested for anything else than a stream.
    """
    check_progress(request.return_progress, is_stream=bool(request.stream))
    count = request.prompt_logprobs
    if count is None:
        return []
    if not 0 <= count <= PROMPT_LOGPROBS_MAX:
        message = f"'prompt_logprobs' is at most {PROMPT_LOGPROBS_MAX}; -1 would be the whole vocabulary."
        raise BadRequest(message, "prompt_logprobs", "invalid_value")
    if not request.stream:
        return []
    if count:
        message = "'prompt_logprobs' are not available in streams: chunks have no place for them. Set 'stream': false."
        raise BadRequest(message, "prompt_logprobs", "invalid_value")
    return ["prompt_logprobs"]


def _refuse_unserved_chat(request: ChatCompletionRequest) -> None:
    if request.modalities and request.modalities != ["text"]:
        raise Unsupported("Only the modality 'text' is supported.", "modalities")
    if request.prediction is not None and request.prediction.type != "content":
        raise Unsupported("Only predictions of the type 'content' are supported.", "prediction.type")
    for name in ("audio", "web_search_options"):
        # An empty object is refused too.
        if getattr(request, name) is not None:
            raise Unsupported(f"'{name}' is not supported.", name)
