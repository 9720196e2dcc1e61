"""Request bodies of OpenAI's Responses API. One struct represents items of all types; `type` decides which fields
apply.

Tools of a Responses request, as the prompt shows them and as the client names them.
"""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from gateway.api.common.canonical import FunctionTool, ToolMode, ToolPolicy, sendable
from gateway.api.common.decode import Schema, converted
from gateway.api.common.request_fields import (
    NULL,
    REFUSED_FIELDS,
    SAMPLER_FIELDS,
    TEXT,
    UNSERVED,
    ExtrasSpec,
    PromptCacheOptions,
    SparsePrefill,
    Speculate,
    case,
    constraint_fields,
    ignored_options,
    shape,
    typed,
    words,
)
from gateway.api.common.thinking import AnthropicThinking, ReasoningSpec
from gateway.api.openai.request import (
    AUDIO_DATA,
    AudioData,
    Effort,
    Seed,
    TopKOrOff,
)
from gateway.errors import BadRequest, Unsupported, invalid_choice, missing_parameter
from gateway.media.media_reference import DETAILS
from protocol.to_worker import AnswerTokens, Penalty, Probability, RepetitionPenalty, Temperature, TokenCount

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
    thinking_budget: TokenCount | None = None
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
    max_output_tokens: AnswerTokens | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=1 << 40)] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    top_k: TopKOrOff | None = None
    min_p: Probability | None = None
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


# Separates a namespace from the name of a function in it. Names contain only letters, digits, `_` and `-`.
NAMESPACE_SEPARATOR: Final = "__"
# A function with one string parameter of this name represents a custom tool.
INPUT: Final = "input"
# These tools run on OpenAI's servers, or only OpenAI's models know them. They are left out and reported in
# `x-mlxd-ignored`.
FOREIGN: Final = frozenset(
    {
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
        "file_search",
        "computer",
        "computer_use_preview",
        "mcp",
        "image_generation",
        "code_interpreter",
        "local_shell",
        "shell",
        "apply_patch",
        "tool_search",
        "programmatic_tool_calling",
    }
)
_CHOICES: Final = {"auto": ToolMode.AUTO, "none": ToolMode.NONE, "required": ToolMode.REQUIRED}


class InputGrammar(Struct, frozen=True):
    """Format of a custom tool's input. The prompt describes it; nothing enforces it."""

    type: str = "text"
    syntax: str = ""
    definition: str = ""


class ResponseTool(Struct, frozen=True):
    """A tool of any type."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputGrammar | None = None
    tools: list["ResponseTool"] | None = None


class NamedTool(Struct, frozen=True):
    """The object in which Chat Completions names a tool."""

    name: str


class AllowedTools(Struct, frozen=True):
    """The object in which Chat Completions lists the allowed tools."""

    mode: str = "auto"
    tools: list["ChoiceSpec"] | None = None


class ChoiceSpec(Struct, frozen=True):
    """A `tool_choice` that is an object, or a tool in it; also with the inner object of Chat Completions."""

    type: str
    name: str = ""
    namespace: str | None = None
    mode: str = "auto"
    tools: list["ChoiceSpec"] | None = None
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: AllowedTools | None = None

    def tool(self, where: str) -> str:
        """Return the name under which the model knows this tool. Raises `BadRequest`."""
        inner = self.function or self.custom
        name = self.name or (inner.name if inner is not None else "")
        if not name:
            raise missing_parameter(f"{where}.name")
        return flat_name(name, self.namespace)


@dataclass(frozen=True, slots=True)
class ToolIdentity:
    """Namespace and name by which the client knows a tool."""

    name: str
    namespace: str = ""
    is_custom: bool = False


@dataclass(slots=True)
class Toolbox:
    """Tools of one request: those in the prompt, a map from the model's names to the client's, the tools to repeat in
    the response, and the names of ignored tools.
    """

    policy: ToolPolicy
    forms: dict[str, ToolIdentity]
    echo: list[dict[str, Any]]
    ignored: list[str]


def toolbox(request: InputTokensRequest) -> Toolbox:
    """Lower the tools of a request. Raises `BadRequest`."""
    tools: list[FunctionTool] = []
    box = Toolbox(ToolPolicy(), {}, [], [])
    for index, raw in enumerate(request.tools or ()):
        where = f"tools[{index}]"
        spec = converted(raw, ResponseTool, where)
        _collect(spec, "", where, tools, box)
        box.echo.append(
            {"description": None, "parameters": None, **raw, "strict": bool(spec.strict)}
            if spec.type == "function"
            else raw
        )
    box.policy = _policy(request, tuple(tools)).check("tool_choice")
    return box


def plain_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any]:
    """Return a tool choice. One that is an object with a mode as its type is that mode, as some clients send it, and
    `any` is the name of `required` in other dialects.
    """
    match choice:
        case None:
            return "auto"
        case "any" | {"type": "any"}:
            return "required"
        case {"type": str(mode)} if mode in _CHOICES:
            return mode
        case _:
            return choice


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name under which the model knows a function."""
    return f"{namespace}{NAMESPACE_SEPARATOR}{name}" if namespace else name


def _collect(spec: ResponseTool, namespace: str, where: str, tools: list[FunctionTool], box: Toolbox) -> None:
    """Add a tool, or the tools of a namespace, to `tools` and `box`."""
    match spec.type:
        case "function" | "custom":
            if not spec.name:
                raise missing_parameter(f"{where}.name")
            tool = _function(spec, namespace, where) if spec.type == "function" else _custom(spec, namespace)
            tools.append(tool)
            if spec.type == "custom" and spec.format is not None and spec.format.definition:
                box.ignored.append("tools.custom.format")
            box.forms[tool.name] = ToolIdentity(spec.name, namespace, spec.type == "custom")
        case "namespace" if not namespace:
            for index, inner in enumerate(spec.tools or ()):
                _collect(inner, spec.name, f"{where}.tools[{index}]", tools, box)
        case kind if kind in FOREIGN:
            box.ignored.append(f"tools.{kind}")
        case kind:
            message = f"Invalid value for '{where}.type': {kind[:50]!r} is not a type of tool."
            raise BadRequest(message, f"{where}.type", "invalid_value")


def _function(spec: ResponseTool, namespace: str, where: str) -> FunctionTool:
    parameters = sendable(spec.parameters or {}, f"{where}.parameters")
    return FunctionTool(flat_name(spec.name, namespace), spec.description or "", parameters, bool(spec.strict))


def _custom(spec: ResponseTool, namespace: str) -> FunctionTool:
    """Return a function with one parameter, the free-form text. Its description contains the grammar."""
    description = spec.description or ""
    if spec.format is not None and spec.format.definition:
        grammar = f"The {INPUT} must match this {spec.format.syntax or 'lark'} grammar:\n{spec.format.definition}"
        description = f"{description}\n\n{grammar}" if description else grammar
    value = {"type": "string", "description": "The whole input of the tool, as plain text."}
    parameters = {"type": "object", "properties": {INPUT: value}, "required": [INPUT], "additionalProperties": False}
    return FunctionTool(flat_name(spec.name, namespace), description, parameters, False)


def _policy(request: InputTokensRequest, tools: tuple[FunctionTool, ...]) -> ToolPolicy:
    is_parallel = request.parallel_tool_calls is not False
    choice = plain_choice(request.tool_choice)
    if isinstance(choice, str):
        return ToolPolicy(tools, _mode(choice, "tool_choice"), is_parallel=is_parallel)
    spec = converted(choice, ChoiceSpec, "tool_choice")
    match spec.type:
        case "function" | "custom":
            return ToolPolicy(tools, ToolMode.NAMED, spec.tool("tool_choice"), is_parallel)
        case "allowed_tools":
            return _allow(tools, spec.allowed_tools or AllowedTools(spec.mode, spec.tools), is_parallel)
        case kind:
            raise BadRequest(f"A tool of type {kind[:50]!r} cannot be called here.", "tool_choice", "invalid_value")


def _allow(tools: tuple[FunctionTool, ...], allowed: AllowedTools, is_parallel: bool) -> ToolPolicy:
    """Return a policy that shows only the allowed tools to the model; tools that are left out stay left out."""
    where = "tool_choice.tools"
    if allowed.tools is None:
        raise missing_parameter(where)
    listed = [(index, tool) for index, tool in enumerate(allowed.tools) if tool.type not in FOREIGN]
    names = {tool.tool(f"{where}[{index}]") for index, tool in listed}
    if unknown := names - {tool.name for tool in tools}:
        raise BadRequest(f"There is no tool named {min(unknown)[:100]!r}.", where, "invalid_value")
    kept = tuple(tool for tool in tools if tool.name in names)
    return ToolPolicy(kept, _mode(allowed.mode, "tool_choice.mode"), is_parallel=is_parallel)


def _mode(word: str, param: str) -> ToolMode:
    if word not in _CHOICES:
        raise BadRequest(f"Invalid value for '{param}': {word[:40]!r}.", param, "invalid_value")
    return _CHOICES[word]
