"""Lowering of Ollama's requests to `protocol.Generate`."""

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.api.common import canonical
from gateway.api.common.canonical import Call, Content, ThinkingBudget, ToolPolicy, arguments_text
from gateway.api.common.drafts import most_drafted, sparse_keep
from gateway.api.common.thinking import of_config
from gateway.api.ollama.conversation import ConversationTurn, read_context
from gateway.api.ollama.options import read_options
from gateway.api.ollama.request import (
    ROLES,
    GenerateRequest,
    GenerationFields,
    OllamaCall,
    OllamaChatRequest,
    OllamaTurn,
)
from gateway.api.openai.tools import lower_tool
from gateway.config.settings import ModelConfig
from gateway.errors import BadRequest, invalid_choice
from gateway.media.reference import IMAGE, by_base64, by_url
from protocol.prompts import ChatPrompt, Infill, Prompt, TextPrompt
from protocol.to_worker import Constraint, ConstraintKind, Generate


def lower_chat(
    request: OllamaChatRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int = 0
) -> Generate:
    """Lower a chat. Raises `BadRequest`."""
    messages = request.messages or []
    turns = _ChatTurns().lower(messages)
    thinking = _thinking(request, model)
    tools = tuple(lower_tool(spec, f"tools[{index}]") for index, spec in enumerate(request.tools or ()))
    # A final assistant turn is the beginning of the answer.
    continues = messages[-1].role == "assistant" and "tool_calls" not in turns[-1] and bool(turns[-1]["content"])
    use = ToolPolicy(tools).check("tools")
    prompt = canonical.chat_prompt(turns, use, thinking, continue_final=continues)
    return _generate(request, prompt, model, next_rid, seed, deadline_ms, thinking.budget)


def lower_generate(
    request: GenerateRequest, model: ModelConfig, next_rid: Callable[[], int], seed: int, deadline_ms: int = 0
) -> Generate:
    """Lower a completion. Raises `BadRequest`."""
    if request.raw or request.suffix:
        prompt = TextPrompt(request.prompt or "", Infill(request.suffix) if request.suffix else None)
        return _generate(request, prompt, model, next_rid, seed, deadline_ms, None)
    thinking = _thinking(request, model)
    turns = [{"role": turn.role, "content": turn.text} for turn in _before(request)]
    turns.append(canonical.user(_content(request.prompt or "", request.images, "images")))
    prompt = canonical.chat_prompt(turns, ToolPolicy(), thinking)
    return _generate(request, prompt, model, next_rid, seed, deadline_ms, thinking.budget)


def check_load(request: GenerationFields, model: ModelConfig) -> None:
    """Check the fields of a request without a prompt, which only loads its model. Raises `BadRequest`."""
    _thinking(request, model)
    _constraint(request.format, after_reasoning=False)


def conversation_of(request: GenerateRequest) -> list[ConversationTurn]:
    """Return the turns of a completion up to and including its prompt, without images. Raises `BadRequest`."""
    return [*_before(request), ConversationTurn("user", request.prompt or "")]


def _before(request: GenerateRequest) -> list[ConversationTurn]:
    """Return the turns before the prompt. The request's `system` replaces the system turn of its `context`."""
    turns = read_context(request.context or ())
    if not request.system:
        return turns
    return [ConversationTurn("system", request.system), *(turn for turn in turns if turn.role != "system")]


def _generate(
    request: GenerationFields,
    prompt: Prompt,
    model: ModelConfig,
    next_rid: Callable[[], int],
    seed: int,
    deadline_ms: int,
    thinking_budget: int | None,
) -> Generate:
    options, _ = read_options(request.options)
    return Generate(
        next_rid(),
        prompt,
        options.sampling(model.sampling, seed),
        max_tokens=options.most_tokens(model.sampling.max_tokens),
        stop=options.stops,
        top_logprobs=request.wanted_logprobs,
        deadline_ms=deadline_ms,
        want_progress=True,
        thinking_budget=thinking_budget,
        constraint=_constraint(request.format, after_reasoning=isinstance(prompt, ChatPrompt)),
        most_drafted=most_drafted(request.speculate),
        truncate=-1 if request.truncate else 0,
        sparse_keep=sparse_keep(request.sparse_prefill),
    )


def _thinking(request: GenerationFields, model: ModelConfig) -> ThinkingBudget:
    default = of_config(model.thinking)
    if isinstance(request.think, str):
        return ThinkingBudget.of_effort(request.think, "think").under(default)
    return ThinkingBudget(request.think).under(default)


def _constraint(wanted: Any, *, after_reasoning: bool) -> Constraint | None:
    """Lower a `format`: `json`, or a schema. A schema is enforced as far as a grammar can enforce it."""
    match wanted:
        case None | "":
            return None
        case "json":
            return Constraint(ConstraintKind.JSON_OBJECT, "", after_reasoning, "format")
        case dict():
            text = msgspec.json.encode(canonical.sendable(wanted, "format")).decode()
            return Constraint(ConstraintKind.JSON_SCHEMA, text, after_reasoning, "format", is_strict=False)
        case _:
            raise BadRequest("Invalid value for 'format': expected 'json' or a JSON schema.", "format", "invalid_value")


def _content(text: str, images: list[str] | None, where: str) -> Content:
    """Return the content of a turn with text and images. The images come first."""
    parts = [_image(image, f"{where}[{index}]") for index, image in enumerate(images or ())]
    return canonical.content([*parts, text] if text or not parts else parts, "")


def _image(image: str, where: str) -> dict[str, Any]:
    return by_url(IMAGE, image, where) if image.startswith("data:") else by_base64(IMAGE, image, where)


class _ChatTurns:
    """Lowers the turns of a chat.

    Calls without an id get one. Each result is matched with the next call that has no result.
    """

    def __init__(self) -> None:
        self._count = 0
        # Calls are numbered. `_waiting` maps the number of each call without a result to the call's id and name.
        # `_by_id` and `_by_name` map ids and names to the numbers of their calls, in order. `_names` maps ids to names.
        self._waiting: dict[int, tuple[str, str]] = {}
        self._by_id: dict[str, deque[int]] = {}
        self._by_name: dict[str, deque[int]] = {}
        self._names: dict[str, str] = {}

    def lower(self, messages: list[OllamaTurn]) -> list[dict[str, Any]]:
        return [self._turn(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _turn(self, message: OllamaTurn, where: str) -> dict[str, Any]:
        text = message.content or ""
        content = _content(text, message.images, f"{where}.images")
        match message.role:
            case "user":
                return canonical.user(content)
            case "system":
                return canonical.system(canonical.only_text(content, where))
            case "assistant":
                calls = [self._call(spec) for spec in message.tool_calls or ()]
                return canonical.assistant(canonical.only_text(content, where), calls, message.thinking)
            case "tool":
                call_id = self._answered(message)
                return canonical.tool_result(call_id, message.tool_name or self._names.get(call_id, ""), content)
            case role:
                raise invalid_choice(role, ROLES, f"{where}.role")

    def _call(self, spec: OllamaCall) -> Call:
        self._count += 1
        call_id, name = spec.id or f"call_{self._count}", spec.function.name
        self._names[call_id] = name
        self._waiting[self._count] = call_id, name
        self._by_id.setdefault(call_id, deque()).append(self._count)
        self._by_name.setdefault(name, deque()).append(self._count)
        return Call(call_id, name, arguments_text(spec.function.arguments))

    def _answered(self, message: OllamaTurn) -> str:
        """Return the id of the call that a result belongs to."""
        wanted_id, wanted_name = message.tool_call_id, message.tool_name
        if wanted_id:
            number = self._first(self._by_id.get(wanted_id))
        elif wanted_name:
            number = self._first(self._by_name.get(wanted_name))
        else:
            number = next(iter(self._waiting), None)
        if number is None:
            return wanted_id or f"call_{wanted_name or 'unknown'}"
        return self._waiting.pop(number)[0]

    def _first(self, numbers: deque[int] | None) -> int | None:
        """Return the number of the first of these calls that has no result.

        The numbers before it are dropped from `numbers`, so that each is checked only once.
        """
        while numbers:
            number = numbers.popleft()
            if number in self._waiting:
                return number
        return None
