"""Bodies of Ollama's requests. Unknown fields are accepted, as by Ollama, and reported as ignored."""

from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from gateway.api.common.canonical import EFFORTS
from gateway.api.common.decode import Schema
from gateway.api.common.doc_hints import TEXT, shape, words
from gateway.api.common.drafts import SparsePrefill, Speculate
from gateway.api.common.extras import ExtrasSpec
from gateway.api.common.refused_fields import REFUSED_FIELDS, RefusedField, constraint_fields
from gateway.api.ollama.keep_alive import KeepAlive, is_zero
from gateway.api.ollama.options import OptionsField, read_options
from gateway.api.openai.request import CalledFunction, ToolSpec
from gateway.errors import BadRequest, Unsupported

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
_generate = Schema(GenerateRequest, refused=_REFUSED)
decode_show: Final = Schema(ShowRequest, SHOW_NO_ACTION).decode
decode_pull: Final = Schema(PullRequest, PULL_NO_ACTION).decode


def decode_chat(body: bytes) -> tuple[OllamaChatRequest, list[str]]:
    """Decode a chat. Returns it with the names of ignored fields. Raises `BadRequest`."""
    request, unknown = _chat.decode(body)
    return request, unknown + _ignored(request)


def decode_generate(body: bytes) -> tuple[GenerateRequest, list[str]]:
    """Decode a completion. Returns it with the names of ignored fields. Raises `BadRequest`."""
    request, unknown = _generate.decode(body)
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
