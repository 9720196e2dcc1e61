"""Bodies of Ollama's requests. Unknown fields are accepted, as by Ollama, and reported as ignored.

Ollama's `keep_alive`: how long a model stays loaded after a request.

`options` of Ollama's requests: sampling, and settings of Ollama's runner, which are ignored.

`context` of a completion: the conversation as integers, which a client sends back without reading them.

Ollama's own integers are token ids. These contain the turns as JSON, three bytes per integer, so that any worker can
continue, with or without its cache, and the chat template renders the turns like all others.

Lowering of Ollama's requests to `protocol.Generate`.
"""

import re
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from gateway.api.common import canonical
from gateway.api.common.canonical import (
    EFFORTS,
    STOP_CHARS_MAX,
    STOPS_MAX,
    Call,
    Content,
    ThinkingBudget,
    ToolPolicy,
    arguments_text,
)
from gateway.api.common.decode import Schema, converted
from gateway.api.common.request_fields import (
    REFUSED_FIELDS,
    SAMPLER_FIELDS,
    TEXT,
    ExtrasSpec,
    RefusedField,
    SparsePrefill,
    Speculate,
    constraint_fields,
    first,
    most_drafted,
    refuse,
    sampling_values,
    shape,
    sparse_keep,
    words,
)
from gateway.api.common.thinking import of_config
from gateway.api.openai.lowering import derive_seed, lower_tool
from gateway.api.openai.request import CalledFunction, ToolSpec
from gateway.config.settings import ModelConfig, SamplingDefaults
from gateway.errors import BadRequest, Unsupported, invalid_choice
from gateway.media.media_reference import IMAGE, by_base64, by_url
from protocol.to_worker import (
    TOKENS_MAX,
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Generate,
    Infill,
    Penalty,
    Probability,
    Prompt,
    RepetitionPenalty,
    Sampling,
    Temperature,
    TextPrompt,
    TypicalP,
)

# Matches durations of zero in Go's notation, or in seconds. Each number of a longer duration must end in a unit;
# otherwise matching a row of zeros could take exponential time.
_ZERO: Final = re.compile(r"[-+]?(0+(\.0*)?|(0+(\.0*)?(ns|us|µs|μs|ms|s|m|h))+)")
KeepAlive = float | Annotated[str, Meta(max_length=64)]


def is_zero(keep_alive: float | str | None) -> bool:
    """Whether a `keep_alive` is a duration of zero."""
    return bool(_ZERO.fullmatch(keep_alive.strip())) if isinstance(keep_alive, str) else keep_alive == 0


_SEED_MAX: Final = (1 << 63) - 1
# Some clients write whole numbers with a fraction, such as 1.0.
Whole = Annotated[int, Meta(ge=-1, le=TOKENS_MAX)] | Annotated[float, Meta(ge=-1, le=TOKENS_MAX)]
Limit = Annotated[int, Meta(ge=-2, le=TOKENS_MAX)] | Annotated[float, Meta(ge=-2, le=TOKENS_MAX)]
Seed = Annotated[int, Meta(ge=-(1 << 63), le=_SEED_MAX)] | Annotated[float, Meta(ge=-(2**62), le=2**62)]
StopText = Annotated[str, Meta(max_length=STOP_CHARS_MAX)]

# These options control how Ollama's runner loads a model and truncates its context, and have no effect here.
NO_ACTION: Final = frozenset(
    {
        *("numa", "num_batch", "num_gpu", "main_gpu", "num_thread", "low_vram", "f16_kv", "logits_all", "vocab_only"),
        *("use_mmap", "use_mlock", "embedding_only", "num_keep", "mirostat_tau", "mirostat_eta"),
    }
)

_REFUSED_OPTIONS: Final = (
    REFUSED_FIELDS | SAMPLER_FIELDS | constraint_fields("format", "options.num_predict", "options.stop")
)


class OllamaOptions(Struct, frozen=True):
    """Options that have an effect or are refused. A negative limit means no limit."""

    temperature: Temperature | None = None
    top_k: Whole | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    seed: Seed | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=STOPS_MAX)] | None = None
    num_predict: Limit | None = None
    repeat_penalty: RepetitionPenalty | None = None
    # Number of tokens to which penalties apply: 0 means none, -1 all.
    repeat_last_n: Whole | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    typical_p: TypicalP | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings that are not empty."""
        texts = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(text for text in texts if text)

    @property
    def wanted_seed(self) -> int | None:
        """The requested seed as a whole number; None if there is none."""
        return None if self.seed is None else int(self.seed)

    def most_tokens(self, default: int | None) -> int | None:
        """Return the maximum number of tokens of the answer. None lets the answer continue up to the end of the
        context.
        """
        if self.num_predict is None:
            return default
        return int(self.num_predict) if self.num_predict > 0 else None

    def sampling(self, defaults: SamplingDefaults, seed: int) -> Sampling:
        """Return the sampling of a request. If an option is missing, the model's default is used, not Ollama's."""
        looks_back = self.repeat_last_n is None or self.repeat_last_n != 0
        repetition = first(self.repeat_penalty, defaults.repetition_penalty, 1.0)
        values = sampling_values(self, defaults) | {"repetition_penalty": repetition}
        if not looks_back:
            values |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return Sampling(
            **values,
            seed=derive_seed(seed, 0),
            penalty_window=max(0, int(self.repeat_last_n or 0)),
            typical_p=1.0 if self.typical_p is None else self.typical_p,
        )


def _properties() -> dict[str, Any]:
    """Return the properties of `OllamaOptions`. They are added to the field's schema, because the field is decoded as
    any object.
    """
    _, components = msgspec.json.schema_components([OllamaOptions])
    return {"type": "object", "properties": components[OllamaOptions.__name__]["properties"]}


OptionsField = Annotated[dict[str, Any], shape(_properties())]


def read_options(raw: Mapping[str, Any] | None) -> tuple[OllamaOptions, list[str]]:
    """Read the options. Returns them with the names of ignored options. Raises `BadRequest`."""
    known = OllamaOptions.__struct_fields__
    given = {name: value for name, value in (raw or {}).items() if value is not None}
    options = converted({name: given[name] for name in known if name in given}, OllamaOptions, "options")
    others = {name: value for name, value in given.items() if name not in known and name not in NO_ACTION}
    refuse(others, _REFUSED_OPTIONS, "options.")
    return options, [f"options.{name}" for name in others if name not in _REFUSED_OPTIONS]


# This mark is larger than any token id of Ollama's own contexts.
MARK: Final = 0x6D6C7864
# Some clients use signed 32-bit integers, into which three bytes fit.
_WIDTH: Final = 3
_WORD: Final = 1 << (8 * _WIDTH)
# Each integer is packed into this many bytes.
_BYTES: Final = 4


class ConversationTurn(Struct, frozen=True, array_like=True):
    """One turn, without its images."""

    role: Literal["system", "user", "assistant"]
    text: str


_turns: Final = msgspec.json.Decoder(list[ConversationTurn])


def write_context(turns: Sequence[ConversationTurn]) -> list[int]:
    """Encode turns as integers: the mark, the length in bytes, and the bytes."""
    data = msgspec.json.encode(turns)
    count = len(data) // _WIDTH
    whole = count * _WIDTH
    # There may be a million integers. Slice assignments avoid a Python step for each of them.
    words = bytearray(count * _BYTES)
    for at in range(_WIDTH):
        words[_WIDTH - 1 - at :: _BYTES] = data[at:whole:_WIDTH]
    end = [int.from_bytes(data[whole:], "big")] if whole < len(data) else []
    return [MARK, len(data), *struct.unpack(f"<{count}I", words), *end]


def read_context(numbers: Sequence[int]) -> list[ConversationTurn]:
    """Decode the turns that `write_context` has encoded. Raises `BadRequest`."""
    if not numbers:
        return []
    if len(numbers) < 2 or numbers[0] != MARK or min(numbers) < 0 or max(numbers[1:]) >= _WORD:
        raise _foreign()
    size, words = numbers[1], numbers[2:]
    count, width = divmod(size, _WIDTH)
    if len(words) != count + bool(width) or (width and words[-1] >= 1 << (8 * width)):
        raise _foreign()
    packed = struct.pack(f"<{count}I", *words[:count])
    data = bytearray(count * _WIDTH)
    for at in range(_WIDTH):
        data[at::_WIDTH] = packed[_WIDTH - 1 - at :: _BYTES]
    if width:
        data += words[-1].to_bytes(width, "big")
    try:
        return _turns.decode(bytes(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise _foreign() from None


def _foreign() -> BadRequest:
    message = "'context' is none that this server has sent. Leave it out, or send the conversation to /api/chat."
    return BadRequest(message, "context", "invalid_value")


ROLES: Final = ("system", "user", "assistant", "tool")

Think = bool | Annotated[str, Meta(max_length=32), words(*EFFORTS)]
Format = Annotated[Any, shape({"anyOf": [{"enum": ["", "json"]}, {"type": ["object", "null"]}]})]
Images = list[Annotated[str, shape(TEXT)]]
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
ContextWord = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]


class OllamaCall(Struct, frozen=True):
    """A call in an earlier turn."""

    function: CalledFunction
    id: str | None = None


class OllamaTurn(Struct, frozen=True):
    """A turn. A tool's result belongs to the call with its `tool_call_id`, or to the next call of `tool_name`."""

    role: Annotated[str, words(*ROLES)]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class GenerationFields(Struct, frozen=True, kw_only=True):
    """Fields that chats and completions share."""

    # An empty name means the model in `[server] default`, as on all routes.
    model: str = ""
    stream: bool | None = None
    format: Format = None
    options: OptionsField | None = None
    think: Think | None = None
    keep_alive: KeepAlive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    # Whether the oldest turns are dropped if the prompt is too long. By default such a prompt is refused with a 400.
    truncate: bool | None = None
    # Whether the context is truncated during an answer. Ignored: a long answer ends at the context's limit.
    shift: bool | None = None
    # Whether tokens are drafted, and the maximum number of tokens in a draft. This field is mlxd's own.
    speculate: Speculate | None = None
    # Whether a long prompt is prefilled sparsely, and the fraction of it that is kept. This field is mlxd's own.
    sparse_prefill: SparsePrefill | None = None
    # What the answer has in addition. This field is mlxd's own.
    x_mlxd: ExtrasSpec | None = None

    @property
    def is_stream(self) -> bool:
        return self.stream is not False

    @property
    def is_last(self) -> bool:
        """Whether the model must be unloaded after this request."""
        return is_zero(self.keep_alive)

    @property
    def wanted_logprobs(self) -> int | None:
        """Return the number of alternatives for each token; None means no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class OllamaChatRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /api/chat`. Without messages it loads the model, or unloads it if `keep_alive` is 0."""

    messages: list[OllamaTurn] | None = None
    tools: list[ToolSpec] | None = None


class GenerateRequest(GenerationFields, frozen=True, kw_only=True):
    """`POST /api/generate`. Without a prompt it loads the model, or unloads it if `keep_alive` is 0."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: Annotated[str, shape({"maxLength": 0})] | None = None
    context: list[ContextWord] | None = None
    raw: bool | None = None
    images: Images | None = None


class ModelName(Struct, frozen=True):
    """Name of a model, in Ollama's newer or older field."""

    model: str = ""
    name: str = ""

    @property
    def wanted(self) -> str:
        return self.model or self.name


class ShowRequest(ModelName, frozen=True):
    """`POST /api/show`."""

    verbose: bool | None = None


class PullRequest(ModelName, frozen=True):
    """`POST /api/pull`: a repository of the hub, or a model of the configuration."""

    stream: bool | None = None


# These legacy fields change how Ollama loads a model for one query. They have no effect here.
SHOW_NO_ACTION: Final = frozenset({"system", "template", "options"})
PULL_NO_ACTION: Final = frozenset({"insecure", "username", "password"})

_REFUSED: Final = REFUSED_FIELDS | constraint_fields("format", "options.num_predict", "options.stop")

# Ollama has no choice among tools.
_CHOICE: Final = {
    "tool_choice": RefusedField("choose on /v1/chat/completions, or leave the tools out", ("auto",)),
    "parallel_tool_calls": RefusedField("set it on /v1/chat/completions", (True,)),
}

_chat = Schema(OllamaChatRequest, listed="messages", item=OllamaTurn, refused=_REFUSED | _CHOICE)
_generate_schema = Schema(GenerateRequest, refused=_REFUSED)
decode_show: Final = Schema(ShowRequest, SHOW_NO_ACTION).decode
decode_pull: Final = Schema(PullRequest, PULL_NO_ACTION).decode


def decode_chat(body: bytes) -> tuple[OllamaChatRequest, list[str]]:
    """Decode a chat. Returns it with the names of ignored fields. Raises `BadRequest`."""
    request, unknown = _chat.decode(body)
    return request, unknown + _ignored(request)


def decode_generate(body: bytes) -> tuple[GenerateRequest, list[str]]:
    """Decode a completion. Returns it with the names of ignored fields. Raises `BadRequest`."""
    request, unknown = _generate_schema.decode(body)
    if request.template:
        message = "'template' is not supported: set chat_template of the model in mlxd.toml, or send 'raw': true."
        raise Unsupported(message, "template")
    if request.suffix and (request.system or request.context or request.images):
        raise BadRequest("'suffix' excludes 'system', 'context' and 'images'.", "suffix", "invalid_value")
    if request.raw and (request.system or request.context):
        raise BadRequest("'raw' excludes 'system' and 'context'.", "raw", "invalid_value")
    if request.raw and request.images:
        raise Unsupported("'images' are not supported with 'raw'.", "images")
    ignored = _ignored(request)
    if (request.raw or request.suffix) and request.think:  # No template is applied that could enable thinking.
        ignored.append("think")
    if request.suffix and request.truncate:  # There are no turns that could be dropped.
        ignored.append("truncate")
    return request, unknown + ignored


def is_empty(request: GenerationFields) -> bool:
    """Whether a request has no prompt. Such a request loads or unloads its model."""
    match request:
        case OllamaChatRequest():
            return not request.messages
        case GenerateRequest():
            return not request.prompt and not request.images and not request.suffix
        case _:
            return False


def _ignored(request: GenerationFields) -> list[str]:
    """List ignored fields. The configuration decides how long models stay loaded, and answers are not truncated."""
    _, ignored = read_options(request.options)
    if request.keep_alive is not None and not is_empty(request):
        ignored.append("keep_alive")
    if request.top_logprobs and not request.logprobs:
        ignored.append("top_logprobs")
    return [*ignored, "shift"] if request.shift else ignored


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
