"""Lowering of a Responses request, with the earlier conversation, to one `protocol.Generate`."""

import base64
import binascii
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET

from gateway.api.common import canonical
from gateway.api.common.canonical import Call, Content, arguments_text
from gateway.api.common.constraints import response_format
from gateway.api.common.request_fields import is_prewarm, most_drafted, sampling_values, sparse_keep
from gateway.api.common.thinking import lower_thinking
from gateway.api.openai.lowering import derive_seed, template_kwargs
from gateway.api.responses.request import (
    INPUT,
    ROLES,
    ContentPart,
    InputItem,
    InputTokensRequest,
    ResponsesRequest,
    TextFormat,
    Toolbox,
    flat_name,
)
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest, Unsupported, invalid_choice, missing_parameter
from gateway.media.media_reference import AUDIO, IMAGE, VIDEO, by_base64, by_url, detail_options, document
from protocol.to_worker import BATCH_PRIORITY, ChatPrompt, Constraint, Generate, Sampling

T = TypeVar("T")

TEXT_SEPARATOR: Final = "\n\n"
# `encrypted_content` with this prefix is reasoning that mlxd sealed. Some clients send reasoning back in no other form.
SEAL: Final = "mlxd1."
SUMMARY_PREFIX: Final = "Summary of the conversation so far:\n"
# Items of calls that other servers ran in earlier turns. Models here cannot be shown such calls.
FOREIGN_ITEMS: Final = frozenset(
    {
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "image_generation_call",
        "code_interpreter_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "apply_patch_call",
        "apply_patch_call_output",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "compaction",
        "tool_search_call",
        "tool_search_output",
    }
)


def seal(reasoning: str) -> str:
    """Encode reasoning as opaque text. It is not encrypted, because the client may read it anyway."""
    return SEAL + base64.b64encode(reasoning.encode()).decode()


def unseal(sealed: str | None) -> str | None:
    """Decode a text made by `seal`. Returns None for any other text, and for one that was damaged in transit."""
    if sealed is None or not sealed.startswith(SEAL):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEAL), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None


def lower_prompt(
    request: InputTokensRequest, box: Toolbox, history: Iterable[InputItem]
) -> tuple[ChatPrompt, list[str]]:
    """Return the prompt and the names of the input items that were left out. References must be resolved before.

    The model is not known yet; `with_thinking` applies the model's configuration later. Raises `BadRequest`.
    """
    turns = _ItemTurns()
    if isinstance(request.instructions, str):
        turns.add_system(request.instructions)
    else:
        turns.add_all(request.instructions or (), "instructions")
    turns.add_all(history, "previous_response_id")
    turns.add_all(request.items, "input")
    messages = turns.finish()
    if not messages:
        raise missing_parameter("input")
    kwargs = template_kwargs(request.chat_template_kwargs)
    # A request that cannot be answered is refused here, even if it only asks to count its tokens.
    _constraint(request)
    messages = canonical.named_results(messages)
    return canonical.chat_prompt(messages, box.policy, lower_thinking(request), kwargs), turns.ignored


def lower_items(items: Iterable[InputItem], name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the turns of items, and the names of those that were left out. Raises `BadRequest`."""
    turns = _ItemTurns()
    turns.add_all(items, name)
    return turns.finish(), turns.ignored


def prewarming(prompt: ChatPrompt) -> ChatPrompt:
    """Return a prompt to be processed for a later request. Templates want a user's turn, which may be still to come."""
    if any(turn["role"] == "user" for turn in prompt.messages):
        return prompt
    return msgspec.structs.replace(prompt, messages=[*prompt.messages, canonical.user("")])


def lower_responses(
    request: ResponsesRequest,
    prompt: ChatPrompt,
    model: ModelConfig,
    next_rid: Callable[[], int],
    seed: int,
    deadline_ms: int = 0,
) -> Generate:
    """Lower a request. Raises `BadRequest`."""
    thinking = lower_thinking(request, model.thinking)
    max_tokens = model.sampling.max_tokens if request.max_output_tokens is None else request.max_output_tokens
    is_prewarm_only = request.generate is False or is_prewarm(request.prompt_cache_options)
    wants_logprobs = bool(request.top_logprobs) or request.includes("message.output_text.logprobs")
    return Generate(
        next_rid(),
        canonical.with_thinking(prompt, thinking),
        Sampling(**sampling_values(request, model.sampling), seed=derive_seed(seed, 0)),
        max_tokens=0 if is_prewarm_only else max_tokens,
        top_logprobs=(request.top_logprobs or 0) if wants_logprobs else None,
        deadline_ms=request.window_s * 1000 or deadline_ms,
        priority=BATCH_PRIORITY if request.window_s else 0,
        want_progress=True,
        thinking_budget=None if is_prewarm_only else thinking.budget,
        constraint=_constraint(request),
        most_drafted=most_drafted(request.speculate),
        truncate=-1 if request.truncation == "auto" else 0,
        sparse_keep=sparse_keep(request.sparse_prefill),
    )


def _constraint(request: InputTokensRequest) -> Constraint | None:
    format = request.text.format if request.text is not None else None
    if format is None:
        return None
    if format.type not in ("text", "json_object", "json_schema"):
        message = f"Invalid value for 'text.format.type': {format.type[:40]!r}."
        raise BadRequest(message, "text.format.type", "invalid_value")
    try:
        constraint = response_format(_as_chat(format))
    except BadRequest as error:
        renamed = (error.param or "").replace("response_format.json_schema", "text.format")
        message = error.message.replace("response_format.json_schema", "text.format")
        raise BadRequest(message, renamed.replace("response_format", "text.format"), error.code) from None
    if constraint is None:
        return None
    return msgspec.structs.replace(constraint, after_reasoning=True, param="text.format")


def _as_chat(format: TextFormat) -> dict[str, Any]:
    """Nest the fields of a schema as `response_format` of chat completions does."""
    schema = None if format.schema is UNSET else format.schema
    if format.type != "json_schema":
        return {"type": format.type, "schema": schema}
    strict = None if format.strict is UNSET else format.strict
    return {"type": "json_schema", "json_schema": {"schema": schema, "strict": strict}}


@dataclass(slots=True)
class _ItemTurns:
    """Builds the turns of the prompt from items in order.

    Reasoning, texts and calls between two turns of other roles form one assistant turn.
    """

    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ignored: list[str] = field(default_factory=list[str])
    _reasoning: list[str] = field(default_factory=list[str])
    _texts: list[str] = field(default_factory=list[str])
    _calls: list[Call] = field(default_factory=list[Call])
    _call_ids: set[str] = field(default_factory=set[str])

    def add_all(self, items: Iterable[InputItem], name: str) -> None:
        for index, item in enumerate(items):
            self._add(item, f"{name}[{index}]")

    def add_system(self, text: str) -> None:
        if text:
            self._flush()
            self.messages.append(canonical.system(text))

    def finish(self) -> list[dict[str, Any]]:
        self._flush()
        return self.messages

    def _add(self, item: InputItem, where: str) -> None:
        match item.kind:
            case "message":
                self._add_message(item, where)
            case "reasoning":
                self._reasoning.append(_reasoning(item, where))
            case "function_call" | "custom_tool_call":
                call = _call(item, where)
                self._calls.append(call)
                self._call_ids.add(call.id)
            case "function_call_output" | "custom_tool_call_output":
                self._flush()
                call_id = _required(item.call_id, f"{where}.call_id")
                if call_id not in self._call_ids:
                    message = f"No tool call found for the output with call_id {call_id[:100]!r}."
                    raise BadRequest(message, f"{where}.call_id", "tool_call_not_found")
                output = _required(item.output, f"{where}.output")
                self.messages.append(
                    canonical.tool_result(call_id, "", _content(output, f"{where}.output", TEXT_SEPARATOR))
                )
            case "compaction" if (summary := unseal(item.encrypted_content)) is not None:
                self.add_system(f"{SUMMARY_PREFIX}{summary}")
            case "item_reference":
                raise BadRequest(f"Item with id {(item.id or '')[:100]!r} not found.", where, "item_not_found")
            case kind if kind in FOREIGN_ITEMS:
                self._call_ids.add(item.call_id or "")
                self.ignored.append(f"input.{kind}")
            case kind:
                message = f"Invalid value for '{where}.type': items of type {kind[:50]!r} are not known."
                raise BadRequest(message, f"{where}.type", "invalid_value")

    def _add_message(self, item: InputItem, where: str) -> None:
        place = f"{where}.content"
        content = _required(item.content, place)
        match item.role:
            case "assistant":
                self._texts.append(canonical.only_text(_content(content, place, ""), place))
            case "user":
                self._flush()
                self.messages.append(canonical.user(_content(content, place, TEXT_SEPARATOR)))
            case "system" | "developer":
                self.add_system(canonical.only_text(_content(content, place, TEXT_SEPARATOR), place))
            case None:
                raise missing_parameter(f"{where}.role")
            case role:
                raise invalid_choice(role, ROLES, f"{where}.role")

    def _flush(self) -> None:
        """End the assistant's turn. Reasoning is dropped if no text or call follows it."""
        if self._texts or self._calls:
            reasoning = TEXT_SEPARATOR.join(filter(None, self._reasoning)) or None
            self.messages.append(
                canonical.assistant(TEXT_SEPARATOR.join(filter(None, self._texts)), self._calls, reasoning)
            )
        self._reasoning, self._texts, self._calls = [], [], []


def _call(item: InputItem, where: str) -> Call:
    call_id = _required(item.call_id, f"{where}.call_id")
    name = flat_name(_required(item.name, f"{where}.name"), item.namespace)
    if item.kind == "function_call":
        return Call(call_id, name, arguments_text(item.arguments))
    return Call(call_id, name, msgspec.json.encode({INPUT: _required(item.input, f"{where}.input")}).decode())


def _reasoning(item: InputItem, where: str) -> str:
    """Return the text of a reasoning item: its content if there is any, else the sealed text, else its summary."""
    place, summary = f"{where}.content", f"{where}.summary"
    content = canonical.only_text(_content(item.content or [], place, ""), place)
    told = canonical.only_text(_content(item.summary or [], summary, TEXT_SEPARATOR), summary)
    return content or unseal(item.encrypted_content) or told


def _content(content: str | list[ContentPart], where: str, joint: str) -> Content:
    if isinstance(content, str):
        return content
    return canonical.content((_part(part, f"{where}[{index}]") for index, part in enumerate(content)), joint)


def _part(part: ContentPart, where: str) -> str | dict[str, Any]:
    match part.type:
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            return _required(part.text, f"{where}.text")
        case "refusal":
            return _required(part.refusal, f"{where}.refusal")
        case "input_image":
            if part.file_id is not None:
                raise Unsupported("There are no uploaded files here: send the image as a data URI.", f"{where}.file_id")
            url = _required(part.image_url, f"{where}.image_url")
            return by_url(IMAGE, url, where, detail_options(part.detail, f"{where}.detail"))
        case "input_video":
            return by_url(VIDEO, _required(part.video_url, f"{where}.video_url"), where)
        case "input_audio":
            audio = _required(part.input_audio, f"{where}.input_audio")
            return by_base64(AUDIO, audio.data, where)
        case "input_file":
            return _file(part, where)
        case kind:
            raise BadRequest(f"Invalid value for '{where}.type': {kind[:50]!r}.", f"{where}.type", "invalid_value")


def _file(part: ContentPart, where: str) -> dict[str, Any]:
    if part.file_id is not None:
        raise Unsupported("There are no uploaded files here: send the file as base64.", f"{where}.file_id")
    heading, options = part.filename or "", detail_options(part.detail, f"{where}.detail")
    if part.file_data is not None:
        if part.file_url is not None:
            raise BadRequest("Only one of 'file_data' and 'file_url' is taken.", f"{where}.file_url", "invalid_value")
        return document(part.file_data, heading, where, options)
    return document(_required(part.file_url, f"{where}.file_data"), heading, where, options, is_url=True)


def _required(value: T | None, param: str) -> T:
    if value is None:
        raise missing_parameter(param)
    return value
