"""`POST /v1/decisions` of OpenAI: predicates, choices and scores about one input."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final

import msgspec
from msgspec import Meta, Struct
from starlette.types import Receive, Scope, Send

from gateway.api.common import canonical, serve
from gateway.api.common.decode import Schema
from gateway.api.common.request_fields import TEXT, UNSERVED, case, shape, words
from gateway.api.common.serve import Vectors
from gateway.api.decisions.engine import (
    LEVELS_MAX,
    LEVELS_MIN,
    OPTIONS_MAX,
    OPTIONS_MIN,
    QUESTIONS_MAX,
    Option,
    Question,
    QuestionKind,
    as_text,
    closeness_to_mode,
    decide,
    expected_level,
    top_probability_above_chance,
)
from gateway.api.responses.lowering import lower_items
from gateway.api.responses.request import ROLES, ContentPart, InputItem
from gateway.errors import BadRequest, Unsupported, invalid_choice, missing_parameter
from gateway.media.media_reference import DETAILS
from gateway.request.record import record_of
from gateway.services import Services
from protocol.to_worker import ChatPrompt

NO_ACTION: Final = frozenset({"safety_identifier"})
CACHE_MODES: Final = ("implicit", "explicit")
ITEMS: Final = (
    "message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output",
)  # fmt: skip
# Limits of a JSON part, as in OpenAI's API.
JSON_BYTES_MAX: Final = 256 * 1024
JSON_VALUES_MAX: Final = 10_000
JSON_DEPTH_MAX: Final = 32
_OUTPUTS: Final = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}
_STRING: Final = {"type": "string"}
_STRING_OR_PARTS: Final = {"type": ["string", "array"]}


class CacheBreakpoint(Struct, frozen=True):
    """End of a prefix that is cached if `prompt_cache_options.mode` is `explicit`."""

    mode: Annotated[str, words("explicit")]


class DecisionPart(Struct, frozen=True):
    """Part of a message, of a tool's output, or of a question's instructions."""

    hint: ClassVar = {
        "anyOf": [
            case(("text",), type={"enum": ["input_text", "output_text"]}, text=_STRING),
            case(("refusal",), type={"const": "refusal"}, refusal=_STRING),
            case(("image_url",), type={"const": "input_image"}, image_url=_STRING),
            case(("data",), type={"const": "input_json"}, data={"type": ["object", "array"]}),
        ]
    }

    type: Annotated[str, words("input_text", "output_text", "refusal", "input_image", "input_json")]
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: Annotated[str, words(*DETAILS)] | None = None
    data: dict[str, Any] | list[dict[str, Any]] | None = None
    file_id: Annotated[Any, UNSERVED] = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


class DecisionItem(Struct, frozen=True):
    """Message, tool call or output of the input. A message needs no type."""

    hint: ClassVar = {
        "anyOf": [
            case(("role", "content"), type={"enum": ["message"]}, role=_STRING, content=_STRING_OR_PARTS),
            case(
                ("type", "call_id", "name", "arguments"),
                type={"const": "function_call"},
                call_id=_STRING,
                name=_STRING,
                arguments=_STRING,
            ),
            case(
                ("type", "call_id", "name", "input"),
                type={"const": "custom_tool_call"},
                call_id=_STRING,
                name=_STRING,
                input=_STRING,
            ),
            case(
                ("type", "call_id", "output"), type={"enum": list(_OUTPUTS)}, call_id=_STRING, output=_STRING_OR_PARTS
            ),
        ]
    }

    type: Annotated[str, words(*ITEMS)] = "message"
    id: str | None = None
    role: Annotated[str, words(*ROLES)] | None = None
    content: str | list[DecisionPart] | None = None
    status: str | None = None
    phase: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[DecisionPart] | None = None


class DecisionChoice(Struct, frozen=True):
    """Option of a choice. A text and a boolean of the same letters differ."""

    value: str | bool
    description: str | None = None


class DecisionLevel(Struct, frozen=True):
    """Level of a score."""

    label: str
    description: str | None = None


class DecisionQuestion(Struct, frozen=True):
    """Question of any type. `choices` are for a choice, `levels` for a score, the lowest first."""

    hint: ClassVar = {
        "anyOf": [
            case(type={"const": "predicate"}),
            case(("choices",), type={"const": "choice"}, choices={"type": "array"}),
            case(("levels",), type={"const": "score"}, levels={"type": "array"}),
        ]
    }

    type: Annotated[str, words(*QuestionKind)]
    instructions: Annotated[str, shape(TEXT)] | list[DecisionPart]
    name: str | None = None
    choices: Annotated[list[DecisionChoice], Meta(min_length=OPTIONS_MIN, max_length=OPTIONS_MAX)] | None = None
    levels: Annotated[list[DecisionLevel], Meta(min_length=LEVELS_MIN, max_length=LEVELS_MAX)] | None = None


class InputCacheOptions(Struct, frozen=True):
    """Caching of the input. In mode `explicit`, an input without breakpoints is not cached."""

    mode: Annotated[str, words(*CACHE_MODES)] | None = None
    ttl: Annotated[str, words("30m")] | None = None


class DecisionRequest(Struct, frozen=True, kw_only=True):
    """`POST /v1/decisions`. `input` is a text, or a list of messages, tool calls and outputs."""

    model: str = ""
    input: Annotated[str, shape(TEXT)] | Annotated[list[DecisionItem], Meta(min_length=1)]
    questions: Annotated[list[DecisionQuestion], Meta(min_length=1, max_length=QUESTIONS_MAX)]
    # Only requests with the same key share a cached input.
    prompt_cache_key: Annotated[str, Meta(max_length=1024)] | None = None
    prompt_cache_options: InputCacheOptions | None = None


class ChoiceProbability(Struct, frozen=True):
    value: str | bool
    probability: float


class LevelProbability(Struct, frozen=True):
    label: str
    value: int
    probability: float


class PredicateAnswer(Struct, frozen=True, tag="predicate"):
    name: str | None
    probability: float


class ChoiceAnswer(Struct, frozen=True, tag="choice"):
    """Answer to a choice. `confidence` is (p − 1/n) / (1 − 1/n) for the highest p of n options."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class ScoreAnswer(Struct, frozen=True, tag="score"):
    """Answer to a score: the expected level. `confidence` is 1 less the expected distance from the most probable level,
    relative to the mean distance of all levels from the middle."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class RefusalAnswer(Struct, frozen=True, tag="refusal"):
    """Refusal of one question, because it does not fit the model's context, or has no finite answer."""

    name: str | None


class DecisionInputDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class DecisionOutputDetails(Struct, frozen=True):
    reasoning_tokens: int = 0


class DecisionUsage(Struct, frozen=True):
    """Usage. The input counts once and each question once; no tokens are generated."""

    input_tokens: int
    input_tokens_details: DecisionInputDetails
    total_tokens: int
    output_tokens: int = 0
    output_tokens_details: DecisionOutputDetails = DecisionOutputDetails()


Answer = PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer


class DecisionAnswers(Struct, frozen=True):
    """Answers in the order of the questions."""

    model: str
    answers: list[Answer]
    usage: DecisionUsage


_schema = Schema(DecisionRequest, NO_ACTION, "input", DecisionItem)


async def decisions(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """Handle `POST /v1/decisions`."""
    request, unknown = await serve.read(services, record_of(scope), scope, receive, _schema.decode)
    prompt = lower_input(request.input)
    questions = [lower_question(each, f"questions[{at}]") for at, each in enumerate(request.questions)]

    def render(model: str, probabilities: list[list[float] | None], vectors: Vectors) -> bytes:
        pairs = zip(request.questions, probabilities, strict=True)
        cached = DecisionInputDetails(vectors.cached_tokens)
        usage = DecisionUsage(vectors.prompt_tokens, cached, vectors.prompt_tokens)
        return msgspec.json.encode(DecisionAnswers(model, [answer(*pair) for pair in pairs], usage))

    await decide(
        services, scope, receive, send, request.model, unknown, prompt, questions, render, _cache_salt(request)
    )


def answer(question: DecisionQuestion, probabilities: list[float] | None) -> Answer:
    """Return the answer to a question from the probabilities of its options."""
    name = question.name
    if probabilities is None:
        return RefusalAnswer(name)
    if question.choices is not None:
        pairs = zip(question.choices, probabilities, strict=True)
        each = [ChoiceProbability(choice.value, p) for choice, p in pairs]
        best = max(each, key=lambda option: option.probability)
        return ChoiceAnswer(name, best.value, top_probability_above_chance(probabilities), each)
    if question.levels is not None:
        pairs = zip(question.levels, probabilities, strict=True)
        levels = [LevelProbability(level.label, at, p) for at, (level, p) in enumerate(pairs)]
        return ScoreAnswer(name, expected_level(probabilities), closeness_to_mode(probabilities), levels)
    return PredicateAnswer(name, probabilities[0])


def lower_input(given: str | Sequence[DecisionItem]) -> ChatPrompt:
    """Lower the input to a chat. Raises `BadRequest`."""
    if isinstance(given, str):
        if not given:
            raise BadRequest("'input' is empty.", "input", "invalid_value")
        return _chat([canonical.user(given)])
    _check_calls(given)
    messages, _ = lower_items([_item(each, f"input[{at}]") for at, each in enumerate(given)], "input")
    if not messages:
        raise BadRequest("'input' has no content.", "input", "invalid_value")
    return _chat(canonical.named_results(messages))


def lower_question(question: DecisionQuestion, where: str) -> Question:
    """Lower a question. Raises `BadRequest`."""
    instructions = _instructions(question.instructions, f"{where}.instructions")
    for kind, field, value in (("choice", "choices", question.choices), ("score", "levels", question.levels)):
        if (value is None) is (question.type == kind):
            if value is None:
                raise missing_parameter(f"{where}.{field}")
            message = f"'{where}.{field}' is for questions of type '{kind}' only."
            raise BadRequest(message, f"{where}.{field}", "invalid_value")
    match question.type:
        case "predicate":
            options = [Option("Yes"), Option("No")]
        case "choice":
            options = _choices(question.choices or [], f"{where}.choices")
        case "score":
            options = [Option(level.label, level.description or "") for level in question.levels or ()]
            if len({option.name for option in options}) < len(options):
                raise BadRequest(f"'{where}.levels' has a label twice.", f"{where}.levels", "invalid_value")
        case kind:
            raise invalid_choice(kind, QuestionKind, f"{where}.type")
    return Question(QuestionKind(question.type), instructions, tuple(options))


def _choices(choices: Sequence[DecisionChoice], where: str) -> list[Option]:
    if len({(type(choice.value), choice.value) for choice in choices}) < len(choices):
        raise BadRequest(f"'{where}' has a value twice.", where, "invalid_value")
    # Texts are quoted beside booleans, so that "true" and true look different.
    is_mixed = any(isinstance(choice.value, bool) for choice in choices)
    return [
        Option(msgspec.json.encode(choice.value).decode() if is_mixed else str(choice.value), choice.description or "")
        for choice in choices
    ]


def _instructions(given: str | Sequence[DecisionPart], where: str) -> str:
    if isinstance(given, str):
        text = given
    else:
        texts = [_question_part(part, f"{where}[{at}]") for at, part in enumerate(given)]
        text = "\n\n".join(texts)
    if not text.strip():
        raise BadRequest(f"'{where}' is empty.", where, "invalid_value")
    return text


def _question_part(part: DecisionPart, where: str) -> str:
    if part.type == "input_image":
        raise Unsupported("Images are taken in 'input' only, not in a question.", where)
    lowered = _part(part, where, ("input_text", "input_json"))
    if lowered.text is None:
        raise missing_parameter(f"{where}.text")
    return lowered.text


def _item(item: DecisionItem, where: str) -> InputItem:
    if item.type not in ITEMS:
        raise invalid_choice(item.type, ITEMS, f"{where}.type")
    return InputItem(
        type=item.type,
        id=item.id,
        role=item.role,
        content=_parts(item.content, f"{where}.content", _CONTENT.get(item.role or "", ("input_text",))),
        call_id=item.call_id,
        name=item.name,
        namespace=item.namespace,
        arguments=item.arguments,
        input=item.input,
        output=_parts(item.output, f"{where}.output", ("input_text", "input_image")),
    )


# Types of the parts of a message by its role.
_CONTENT: Final[Mapping[str, tuple[str, ...]]] = {
    "user": ("input_text", "input_image", "input_json"),
    "assistant": ("output_text", "refusal"),
}


def _parts(
    given: str | Sequence[DecisionPart] | None, where: str, types: tuple[str, ...]
) -> str | list[ContentPart] | None:
    if given is None or isinstance(given, str):
        return given
    return [_part(part, f"{where}[{at}]", types) for at, part in enumerate(given)]


def _part(part: DecisionPart, where: str, types: tuple[str, ...]) -> ContentPart:
    if part.type not in types:
        raise invalid_choice(part.type, types, f"{where}.type")
    if part.type == "input_json":
        if part.data is None:
            raise missing_parameter(f"{where}.data")
        return ContentPart("input_text", text=_json_text(part.data, f"{where}.data"))
    return ContentPart(part.type, part.text, part.refusal, part.image_url, part.detail, part.file_id)


def _json_text(data: Any, where: str) -> str:
    text = as_text(canonical.sendable(data, where))
    depth, values = _extent(data)
    if len(text.encode()) > JSON_BYTES_MAX or depth > JSON_DEPTH_MAX or values > JSON_VALUES_MAX:
        limits = f"{JSON_BYTES_MAX} bytes, {JSON_VALUES_MAX} values and {JSON_DEPTH_MAX} levels"
        raise BadRequest(f"'{where}' is larger than {limits}.", where, "invalid_value")
    return text


def _extent(data: Any) -> tuple[int, int]:
    """Return the depth of JSON in levels of containers, and its number of values."""
    level, depth, values = [data], 0, 0
    while level:
        values += len(level)
        containers = [each for each in level if isinstance(each, dict | list)]
        depth += bool(containers)
        level = [value for each in containers for value in (each.values() if isinstance(each, dict) else each)]
    return depth, values


def _check_calls(items: Sequence[DecisionItem]) -> None:
    """Check that each output belongs to an earlier call of its type. Raises `BadRequest`."""
    calls: set[tuple[str, str | None]] = set()
    for at, item in enumerate(items):
        if item.type in _OUTPUTS and (_OUTPUTS[item.type], item.call_id) not in calls:
            param = f"input[{at}].call_id"
            message = f"No earlier {_OUTPUTS[item.type]} has the call_id {(item.call_id or '')[:100]!r}."
            raise BadRequest(message, param, "invalid_value")
        calls.add((item.type, item.call_id))


def _chat(messages: list[dict[str, Any]]) -> ChatPrompt:
    return canonical.chat_prompt(messages, canonical.ToolPolicy(), canonical.ThinkingBudget(is_enabled=False), {})


def _cache_salt(request: DecisionRequest) -> str:
    options = request.prompt_cache_options
    if options is None:
        return request.prompt_cache_key or ""
    if options.mode not in (None, *CACHE_MODES):
        raise invalid_choice(options.mode, CACHE_MODES, "prompt_cache_options.mode")
    if options.ttl not in (None, "30m"):
        raise invalid_choice(options.ttl, ("30m",), "prompt_cache_options.ttl")
    if options.mode == "explicit" and not _has_breakpoint(request.input):
        # A salt that no other request has: nothing is shared.
        return secrets.token_hex(16)
    return request.prompt_cache_key or ""


def _has_breakpoint(given: str | Sequence[DecisionItem]) -> bool:
    contents = [] if isinstance(given, str) else [content for item in given for content in (item.content, item.output)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(part.prompt_cache_breakpoint is not None for part in parts)
