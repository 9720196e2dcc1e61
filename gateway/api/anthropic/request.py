"""Request of Anthropic's Messages API and its lowering, as lenient with extra fields as the real API."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct

from gateway.api.anthropic.content_blocks import Block, MessageParam
from gateway.api.anthropic.context_edits import ContextManagement, edited
from gateway.api.anthropic.message_turns import left_out_blocks, message_turns, system_text
from gateway.api.common import canonical
from gateway.api.common.canonical import (
    EFFORTS,
    STOP_CHARS_MAX,
    STOPS_MAX,
    FunctionTool,
    ThinkingBudget,
    ToolMode,
    ToolPolicy,
)
from gateway.api.common.decode import Schema
from gateway.api.common.doc_hints import TEXT, words
from gateway.api.common.drafts import SparsePrefill, Speculate, most_drafted, sparse_keep
from gateway.api.common.extras import ExtrasSpec
from gateway.api.common.refused_fields import REFUSED_FIELDS, SAMPLER_FIELDS, RefusedField, constraint_fields
from gateway.api.common.sampling import sampling_values
from gateway.api.common.thinking import of_config
from gateway.api.openai.lowering import derive_seed
from gateway.api.openai.request import Seed
from gateway.config.settings import ModelConfig, ThinkingDefaults
from gateway.errors import BadRequest, Unsupported, missing_parameter
from protocol.prompts import ChatPrompt
from protocol.to_worker import Constraint, ConstraintKind, Generate, Sampling

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


Tokens = Annotated[int, Meta(ge=1, le=1 << 40)]
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
    budget_tokens: Tokens | None = None


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
    max_tokens: Annotated[int, Meta(ge=0, le=1 << 40)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopSequence], Meta(max_length=STOPS_MAX)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
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
