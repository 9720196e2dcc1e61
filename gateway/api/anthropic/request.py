"""Request of Anthropic's Messages API and its lowering, as lenient with extra fields as the real API.

Messages of an Anthropic conversation, and the blocks of their content.

Anthropic's `context_management`: edits of a conversation before the model reads it.

Lowering of Anthropic's document blocks: PDFs, plain text, and content blocks.

Lowering of the messages and blocks of an Anthropic conversation to turns.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from gateway.api.common import canonical
from gateway.api.common.canonical import (
    EFFORTS,
    STOP_CHARS_MAX,
    STOPS_MAX,
    Call,
    Content,
    FunctionTool,
    ThinkingBudget,
    ToolMode,
    ToolPolicy,
)
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import (
    REFUSED_FIELDS,
    SAMPLER_FIELDS,
    TEXT,
    ExtrasSpec,
    RefusedField,
    SparsePrefill,
    Speculate,
    constraint_fields,
    known,
    most_drafted,
    sampling_values,
    sparse_keep,
    words,
)
from gateway.api.common.thinking import of_config
from gateway.api.openai.lowering import derive_seed
from gateway.api.openai.request import Seed
from gateway.config.settings import ModelConfig, ThinkingDefaults
from gateway.errors import BadRequest, Unsupported, missing_parameter
from gateway.media.media_reference import IMAGE, by_base64, by_url, document
from protocol.to_worker import (
    AnswerTokens,
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Generate,
    Probability,
    Sampling,
    TokenCount,
    TopK,
)

# Types of blocks that prompts have a form for.
SHOWN: Final = ("text", "image", "document", "search_result", "tool_reference", "tool_use", "tool_result", "thinking")
BLOCKS: Final = (*SHOWN, "redacted_thinking")


class Block(Struct, frozen=True):
    """Content block of any type. Its `type` decides which of the fields apply."""

    # Other types than those shown are an error in user messages, and are left out of other messages.
    type: Annotated[str, known(*BLOCKS)]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    tool_name: str | None = None
    content: "str | list[Block] | dict[str, Any] | None" = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    source: str | dict[str, Any] | None = None
    title: str | None = None
    context: str | None = None
    # The setting of a document or search result, or the citations of an answer's text.
    citations: dict[str, Any] | list[Any] | None = None


class MessageParam(Struct, frozen=True):
    role: Annotated[str, words("user", "assistant", "system")]
    content: str | list[Block]


_EDIT: Final = "clear_thinking_20251015"
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})
_ALL: Final = "all"
_TURNS: Final = "thinking_turns"


class ThinkingTurns(Struct, frozen=True):
    """Number of turns whose thinking is kept."""

    type: Annotated[str, words(_ALL, _TURNS)]
    value: Annotated[int, Meta(ge=1, le=1 << 40)] = 1


class ContextEdit(Struct, frozen=True):
    """Edit that removes thinking. Without `keep`, only the thinking of the newest turn is kept."""

    type: Annotated[str, words(_EDIT)]
    keep: ThinkingTurns | Annotated[str, words(_ALL)] | None = None


class ContextManagement(Struct, frozen=True):
    edits: list[ContextEdit] | None = None


def edited(messages: Sequence[MessageParam], management: ContextManagement | None) -> Sequence[MessageParam]:
    """Return the conversation after all edits. Raises `BadRequest`."""
    for index, edit in enumerate(management.edits or () if management is not None else ()):
        kept = _kept_turns(edit, f"context_management.edits.{index}")
        if kept is not None:
            old = {at for turn in [*_thinking_turns(messages)][:-kept] for at in turn}
            messages = [_without_thinking(each) if at in old else each for at, each in enumerate(messages)]
    return messages


def _kept_turns(edit: ContextEdit, where: str) -> int | None:
    """Return the number of turns whose thinking is kept; None means all."""
    if edit.type != _EDIT:
        message = f"{where}: edits of type {edit.type[:40]!r} are not supported; '{_EDIT}' is."
        raise Unsupported(message, where)
    kind = edit.keep if isinstance(edit.keep, str) else edit.keep.type if edit.keep is not None else _TURNS
    if kind not in (_ALL, _TURNS):
        raise BadRequest(f"{where}.keep: {kind[:40]!r} is none of {_ALL}, {_TURNS}.", f"{where}.keep", "invalid_value")
    if kind == _ALL:
        return None
    return edit.keep.value if isinstance(edit.keep, ThinkingTurns) else 1


def _thinking_turns(messages: Sequence[MessageParam]) -> Iterator[list[int]]:
    """Yield the indices of each turn's messages with thinking. A turn ends at a user message that has more than tool
    results.
    """
    turn: list[int] = []
    for at, message in enumerate(messages):
        if _types(message) & _THINKING:
            turn.append(at)
        elif message.role == "user" and turn and _types(message) - {"tool_result"}:
            yield turn
            turn = []
    if turn:
        yield turn


def _types(message: MessageParam) -> set[str]:
    return {"text"} if isinstance(message.content, str) else {block.type for block in message.content}


def _without_thinking(message: MessageParam) -> MessageParam:
    blocks = [] if isinstance(message.content, str) else message.content
    return structs.replace(message, content=[block for block in blocks if block.type not in _THINKING])


Part = str | dict[str, Any]


def document_parts(block: Block, where: str, lower: Callable[[Block, str], list[Part]]) -> list[Part]:
    """Lower a document block. `lower` lowers the blocks inside it. Raises `BadRequest`."""
    heading = "\n".join(filter(None, (block.title, block.context)))
    match block.source:
        case {"type": "base64", "data": str(data)}:
            return [document(data, heading, where)]
        case {"type": "url", "url": str(url)}:
            return [document(url, heading, where, is_url=True)]
        case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
            return ["\n".join(filter(None, (heading, text)))]
        case {"type": "content", "content": list(content)}:
            parts = [
                part
                for index, inner in enumerate(_blocks(content, f"{where}.source.content"))
                for part in _inner(inner, f"{where}.source.content.{index}", lower)
            ]
            return [heading, *parts] if heading else parts
        case {"type": "file"}:
            raise Unsupported(f"{where}: there are no uploaded files here; send the document as base64.", where)
        case _:
            param = f"{where}.source"
            message = f"{param}: a document's source is of type base64, text, with data, or url or content."
            raise BadRequest(message, param, "invalid_value")


def refuse_citations(block: Block, where: str) -> None:
    """Raises `Unsupported` if a document or a search result asks for citations."""
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        param = f"{where}.citations"
        raise Unsupported(f"{param}: citations are not supported; leave them disabled.", param)


def _blocks(content: list[Any], where: str) -> list[Block]:
    try:
        return msgspec.convert(content, list[Block])
    except msgspec.ValidationError as error:
        raise BadRequest(f"{where}: {error}.", where, "invalid_value") from None


def _inner(block: Block, where: str, lower: Callable[[Block, str], list[Part]]) -> list[Part]:
    if block.type not in ("text", "image"):
        message = f"{where}: a document's content has blocks of type text and image only."
        raise BadRequest(message, where, "invalid_value")
    return lower(block, where)


T = TypeVar("T")

# Claude Code's first system block begins with this text, followed by a value that changes with every session. The line
# is removed, because the value would defeat the prefix cache.
VOLATILE_SYSTEM: Final = "x-anthropic-billing-header:"
# Text between joined blocks and messages. With it, a list of texts gives the same prompt as one string.
JOINT: Final = "\n\n"


def system_text(system: str | list[Block] | None) -> str:
    """Return the text of the system prompt. Raises `BadRequest`."""
    if isinstance(system, str):
        return _lasting(system)
    texts = [_lasting(_only_text(block, f"system.{index}")) for index, block in enumerate(system or ())]
    return JOINT.join(text for text in texts if text)


def _only_text(block: Block, where: str) -> str:
    return canonical.only_text(canonical.content(_parts(block, where), JOINT), where)


def _lasting(text: str) -> str:
    """Remove the first line of the system text if it differs between sessions."""
    return text.partition("\n")[2].lstrip("\n") if text.startswith(VOLATILE_SYSTEM) else text


def message_turns(message: MessageParam, where: str) -> list[dict[str, Any]]:
    """Lower one message to turns. Each tool result becomes a turn. Raises `BadRequest`."""
    blocks = [Block("text", message.content)] if isinstance(message.content, str) else message.content
    match message.role:
        case "user":
            return _user_turns(blocks, where)
        case "assistant":
            return [_assistant_turn(blocks, where)]
        case "system":
            # Blocks that are left out announce changes of tools, which are also in the request's list of tools.
            shown = [(index, block) for index, block in enumerate(blocks) if block.type in SHOWN]
            return [canonical.system(JOINT.join(_only_text(block, f"{where}.content.{at}") for at, block in shown))]
        case role:
            raise BadRequest(f"{where}.role: {role[:40]!r} is none of user, assistant, system.", f"{where}.role")


def _user_turns(blocks: list[Block], where: str) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    parts: list[Part] = []
    for index, block in enumerate(blocks):
        at = f"{where}.content.{index}"
        if block.type != "tool_result":
            parts += _parts(block, at)
            continue
        if parts:
            turns.append(canonical.user(canonical.content(parts, JOINT)))
            parts = []
        turns.append(canonical.tool_result(block.tool_use_id or "", "", _result(block, at)))
    if parts or not turns:
        turns.append(canonical.user(canonical.content(parts, JOINT)))
    return turns


def left_out_blocks(messages: Iterable[MessageParam]) -> list[str]:
    """Return the names of the types of blocks that are left out of the prompt."""
    blocks = (block for message in messages if isinstance(message.content, list) for block in message.content)
    return [f"messages.{kind}" for kind in dict.fromkeys(block.type for block in blocks) if kind not in SHOWN]


def _assistant_turn(blocks: list[Block], where: str) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    for index, block in enumerate(blocks):
        at = f"{where}.content.{index}"
        match block.type:
            case "thinking":
                reasoning.append(_required(block.thinking, f"{at}.thinking"))
            case "tool_use":
                arguments = msgspec.json.encode(block.input or {}).decode()
                calls.append(Call(block.id or "", _required(block.name, f"{at}.name"), arguments))
            case "text":
                texts.append(_required(block.text, f"{at}.text"))
            case kind if kind in SHOWN:
                message = f"{at}: blocks of type {kind!r} do not belong in messages of the assistant."
                raise BadRequest(message, at, "invalid_value")
            case _:
                pass  # Redacted thinking and server tools are left out, because prompts have no form for them.
    return canonical.assistant(JOINT.join(texts), calls, JOINT.join(reasoning) or None)


def _result(block: Block, where: str) -> Content:
    shown = _content(block, where)
    if not block.is_error:
        return shown
    return f"Error: {shown}" if isinstance(shown, str) else [{"type": "text", "text": "Error:"}, *shown]


def _content(block: Block, where: str) -> Content:
    match block.content:
        case str(text):
            return text
        case list(blocks):
            parts = [part for index, inner in enumerate(blocks) for part in _parts(inner, f"{where}.content.{index}")]
            return canonical.content(parts, JOINT)
        case None if block.text is None:
            return ""
        case _:
            param = f"{where}.content"
            raise BadRequest(f"{param}: expected text or a list of blocks.", param, "invalid_value")


def _parts(block: Block, where: str) -> list[Part]:
    """Lower a block to its texts and media."""
    refuse_citations(block, where)
    match block.type:
        case "image":
            return [_image(block, where)]
        case "document":
            return document_parts(block, where, _parts)
        case _:
            return [_text(block, where)]


def _image(block: Block, where: str) -> dict[str, Any]:
    source = block.source if isinstance(block.source, dict) else {}
    match source:
        case {"type": "base64", "data": str(data)}:
            return by_base64(IMAGE, data, where)
        case {"type": "url", "url": str(url)}:
            return by_url(IMAGE, url, where)
        case {"type": "file"}:
            raise Unsupported(f"{where}: there are no uploaded files here; send the image as base64.", where)
        case _:
            param = f"{where}.source"
            raise BadRequest(
                f"{param}: an image's source is of type base64, with data, or url.", param, "invalid_value"
            )


def _text(block: Block, where: str) -> str:
    match block.type:
        case "text":
            return _required(block.text, f"{where}.text")
        case "search_result":
            return _search_result(block, where)
        case "tool_reference":
            return f"Tool available: {_required(block.tool_name, f'{where}.tool_name')}"
        case kind:
            raise Unsupported(f"{where}: content blocks of type {kind[:40]!r} are not supported.", where)


def _search_result(block: Block, where: str) -> str:
    _required(block.content, f"{where}.content")
    if isinstance(block.source, dict):
        param = f"{where}.source"
        raise BadRequest(f"{param}: expected text.", param, "invalid_value")
    text = canonical.only_text(_content(block, where), where)
    return f"{block.title or ''}\n{block.source or ''}\n{text}".strip()


def _required(value: T | None, param: str) -> T:
    if value is None:
        raise missing_parameter(param)
    return value


CHOICES: Final = {"auto": ToolMode.AUTO, "any": ToolMode.REQUIRED, "tool": ToolMode.NAMED, "none": ToolMode.NONE}

# Any value of these fields is accepted, because they request nothing from a local server.
NO_ACTION: Final = frozenset(
    {
        "metadata",
        "service_tier",
        "safeguards",
        "betas",
        "inference_geo",
        "cache_control",
    }
)


StopSequence = Annotated[str, Meta(max_length=STOP_CHARS_MAX)]


class ToolParam(Struct, frozen=True):
    """A tool of the client, or a tool that Anthropic's servers run, which `type` names."""

    hint: ClassVar = {"required": ["name"], "properties": {"name": TEXT}}

    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChoice(Struct, frozen=True):
    type: Annotated[str, words(*CHOICES)]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Struct, frozen=True):
    type: Annotated[str, words("enabled", "disabled", "adaptive")]
    budget_tokens: AnswerTokens | None = None


class OutputFormat(Struct, frozen=True):
    type: Annotated[str, words("json_schema", "")] = ""
    schema: dict[str, Any] | None = None


class OutputConfig(Struct, frozen=True):
    effort: Annotated[str, words(*EFFORTS)] | None = None
    format: OutputFormat | None = None


class CountRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/messages/count_tokens`: the part of a request that forms the prompt."""

    model: str = ""
    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None


class DiagnosticsParam(Struct, frozen=True):
    """Id of the message whose request this one is compared with; null only asks for the field of the answer."""

    previous_message_id: Annotated[str, Meta(max_length=200)] | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True):
    """`POST /v1/messages`."""

    # With 0 the prompt is only put into the prefix cache.
    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=STOPS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Probability | None = None
    top_k: TopK | None = None
    # Seed of the sampling. This field is mlxd's own.
    seed: Seed | None = None
    # Whether tokens are drafted, and the maximum number of tokens in a draft. This field is mlxd's own.
    speculate: Speculate | None = None
    # Whether a long prompt is prefilled sparsely, and the fraction of it that is kept. This field is mlxd's own.
    sparse_prefill: SparsePrefill | None = None
    # What the answer has in addition. This field is mlxd's own.
    x_mlxd: ExtrasSpec | None = None
    diagnostics: DiagnosticsParam | None = None


_REFUSED: Final = (
    REFUSED_FIELDS
    | SAMPLER_FIELDS
    | constraint_fields("output_config.format", "max_tokens", "stop_sequences")
    | {
        "mcp_servers": RefusedField("give the model their tools in 'tools'"),
        "container": RefusedField("no code is run here"),
        "compaction": RefusedField("ask for a summary in a message"),
        "thread": RefusedField("send the whole conversation in 'messages'"),
    }
)
_messages = Schema(MessagesRequest, NO_ACTION, "messages", MessageParam, refused=_REFUSED)
# Clients also send whole requests for messages to be counted, so their other fields are accepted.
decode_count: Final = Schema(
    CountRequest, NO_ACTION | frozenset(MessagesRequest.__struct_fields__), "messages", MessageParam
).decode


def decode_messages(body: bytes) -> tuple[MessagesRequest, list[str]]:
    """Decode a request. Returns it with the names of unknown fields. Raises `BadRequest`."""
    request, unknown = _messages.decode(body)
    return request, unknown + _skipped_tools(request) + left_out_blocks(request.messages)


def lower_prompt(request: CountRequest, default: ThinkingDefaults | None = None) -> tuple[ChatPrompt, ThinkingBudget]:
    """Lower the prompt of a request. Raises `BadRequest`."""
    turns: list[dict[str, Any]] = []
    system = system_text(request.system)
    if system:
        turns.append(canonical.system(system))
    for index, message in enumerate(edited(request.messages, request.context_management)):
        turns += message_turns(message, f"messages.{index}")
    tool_use = _tool_use(request)
    thinking = _thinking(request, of_config(default))
    _constraint(request)  # Token counting must reject an invalid constraint too.
    # A final assistant turn is the beginning of the answer, unless it is empty.
    continues = request.messages[-1].role == "assistant" and "tool_calls" not in turns[-1]
    if continues and not turns[-1]["content"]:
        del turns[-1]
        continues = False
    if not turns:
        raise BadRequest("messages: there is nothing to answer.", "messages")
    prompt = canonical.chat_prompt(canonical.named_results(turns), tool_use, thinking, continue_final=continues)
    return prompt, thinking


def lower_messages(
    request: MessagesRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int = 0
) -> Generate:
    """Lower a request. Raises `BadRequest`."""
    prompt, thinking = lower_prompt(request, model.thinking)
    stops = tuple(stop for stop in request.stop_sequences or () if stop)
    return Generate(
        next_rid(),
        prompt,
        Sampling(**sampling_values(request, model.sampling), seed=derive_seed(seed, 0)),
        max_tokens=request.max_tokens,
        stop=stops,
        deadline_ms=deadline_ms,
        want_progress=True,
        thinking_budget=thinking.budget if request.max_tokens else None,
        constraint=_constraint(request),
        most_drafted=most_drafted(request.speculate),
        sparse_keep=sparse_keep(request.sparse_prefill),
    )


def _tool_use(request: CountRequest) -> ToolPolicy:
    tools: list[FunctionTool] = []
    for spec in _shown(request):
        if not spec.name:
            raise BadRequest("tools: a tool needs a name.", "tools")
        schema = canonical.sendable(spec.input_schema or {}, "tools.input_schema")
        tools.append(FunctionTool(spec.name, spec.description or "", schema, bool(spec.strict)))
    choice = request.tool_choice or ToolChoice("auto")
    if choice.type not in CHOICES:
        raise BadRequest(f"tool_choice.type: {choice.type[:40]!r} is none of {', '.join(CHOICES)}.", "tool_choice.type")
    if CHOICES[choice.type] is ToolMode.NAMED and not choice.name:
        raise missing_parameter("tool_choice.name")
    use = ToolPolicy(tuple(tools), CHOICES[choice.type], choice.name or "", not choice.disable_parallel_tool_use)
    return use.check("tool_choice")


def _shown(request: CountRequest) -> list[ToolParam]:
    """Return the tools that the prompt shows.

    Deferred tools are shown once the model has found them. They come last, so that the other tools stay cached.
    """
    specs = [spec for spec in request.tools or () if not _is_skipped(spec)]
    waiting = {spec.name: spec for spec in specs if spec.defer_loading}
    if len(specs) < len(request.tools or ()) or not waiting:
        # The search tool runs on Anthropic's servers and was skipped. All tools are shown, because the model could not
        # search for deferred ones.
        return specs
    names = dict.fromkeys(name for message in request.messages for name in _referenced_tools(message))
    if request.tool_choice is not None and request.tool_choice.name:
        names[request.tool_choice.name] = None
    return [spec for spec in specs if not spec.defer_loading] + [waiting[name] for name in names if name in waiting]


def _referenced_tools(message: MessageParam) -> Iterator[str]:
    """Yield the names of tools that a message calls or references."""
    for block in () if isinstance(message.content, str) else message.content:
        if block.type == "tool_use" and block.name:
            yield block.name
        for part in block.content if isinstance(block.content, list) else ():
            if part.type == "tool_reference" and part.tool_name:
                yield part.tool_name


def _is_skipped(spec: ToolParam) -> bool:
    """Whether a tool is skipped because it runs on Anthropic's servers.

    Such a tool has no schema, so the model could not call it anyway.
    """
    return spec.input_schema is None and spec.type not in (None, "custom", "function")


def _skipped_tools(request: CountRequest) -> list[str]:
    return [f"tools.{spec.type}" for spec in request.tools or () if _is_skipped(spec)]


def _thinking(request: CountRequest, default: ThinkingBudget) -> ThinkingBudget:
    wanted = ThinkingBudget()
    if request.output_config is not None and request.output_config.effort is not None:
        wanted = ThinkingBudget.of_effort(request.output_config.effort, "output_config.effort")
    if request.thinking is None:
        # Thinking must be requested, as in the real API, because other clients read the answer from the first block. An
        # effort alone does not request it.
        return ThinkingBudget(default.is_enabled or False, wanted.effort).under(default)
    match request.thinking.type:
        case "enabled":
            return ThinkingBudget(True, budget=request.thinking.budget_tokens).over(wanted).under(default)
        case "disabled":
            return ThinkingBudget(False)
        case "adaptive":
            return ThinkingBudget(None, wanted.effort).under(default)
        case kind:
            raise BadRequest(f"thinking.type: {kind[:40]!r} is none of enabled, disabled, adaptive.", "thinking.type")


def _constraint(request: CountRequest) -> Constraint | None:
    """Return the constraint on the answer's text."""
    wanted = request.output_format or (request.output_config.format if request.output_config else None)
    if wanted is None or not wanted.type:
        return None
    if wanted.type != "json_schema" or wanted.schema is None:
        raise Unsupported("output_format.type: only 'json_schema' with a schema is supported.", "output_format")
    text = msgspec.json.encode(wanted.schema).decode()
    return Constraint(ConstraintKind.JSON_SCHEMA, text, after_reasoning=True, param="output_format")
