"""Answers of OpenAI's chat and text completions. A struct's tag is the first field in its JSON.

Server-sent events of OpenAI's streams, and a base class for its stream encoders.

Log-probabilities of prompt tokens as vLLM sends them: null for the first token, then an object by token id.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Final, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.api.common.request_fields import Extras, shape
from gateway.errors import ApiError, BadRequest, openai_body
from protocol.from_worker import Finish, Progress, PromptLogprob, TokenLogprob, Usage

_encode: Final = msgspec.json.Encoder().encode


class EventEncoder:
    """Default methods of a `StreamEncoder` for a request with one sequence and no events before its first delta."""

    def bind(self, rids: Sequence[int]) -> None:
        """Ignore the request id, because a request has only one."""

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def error(self, error: ApiError) -> bytes | None:
        return b"data: " + openai_body(error) + b"\n\n"


def event(data: Struct) -> bytes:
    """Encode one event."""
    return b"data: " + _encode(data) + b"\n\n"


def check_progress(wants_progress: bool | None, *, is_stream: bool) -> None:
    """Raises `BadRequest` if progress is requested without a stream."""
    if wants_progress and not is_stream:
        message = "'return_progress' needs 'stream': true: a whole answer has no place for progress."
        raise BadRequest(message, "return_progress", "invalid_value")


# OpenAI's substitute for minus infinity, which JSON cannot express.
LOGPROB_MIN: Final = -9999.0

_FORM: Final[dict[str, Any]] = {
    "type": "array",
    "items": {
        "type": ["object", "null"],
        "additionalProperties": {
            "type": "object",
            "properties": {
                "logprob": {"type": "number"},
                "rank": {"type": "integer"},
                "decoded_token": {"type": "string"},
            },
        },
    },
}

# The entries are kept as JSON, because those of a long prompt would take megabytes as objects.
PromptLogprobs = Annotated[Raw | UnsetType, shape(_FORM)]


class RankedLogprob(Struct, frozen=True):
    """One candidate token: its log-probability, its rank (1 is the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str


def encode_entries(entries: Sequence[PromptLogprob]) -> bytes:
    """Encode one or more entries as JSON, without the brackets around the list."""
    return _encode([_entry(each) for each in entries])[1:-1]


def whole(parts: Sequence[bytes]) -> Raw:
    """Join encoded parts into the whole list."""
    return Raw(b"[" + b",".join(parts) + b"]")


def _entry(entry: PromptLogprob) -> dict[int, RankedLogprob] | None:
    """Return an object with the prompt's own token and the likeliest tokens; None for a prompt's first token."""
    if not entry.rank:
        return None
    named = {entry.id: _ranked(entry.token, entry.logprob, entry.rank)}
    rank, last = 0, float("nan")
    for at, (token, text, logprob) in enumerate(entry.top, 1):
        # Equally likely tokens share a rank.
        rank, last = (rank if logprob == last else at), logprob
        named.setdefault(token, _ranked(text, logprob, rank))
    return named


def _ranked(token: bytes, logprob: float, rank: int) -> RankedLogprob:
    # NaN, which JSON cannot express either, also fails the comparison and becomes LOGPROB_MIN.
    return RankedLogprob(logprob if logprob > LOGPROB_MIN else LOGPROB_MIN, rank, token.decode("utf-8", "replace"))


# Only answers to requests for token ids have this field. It is vLLM's.
TokenIds = Sequence[int] | UnsetType


class PromptTokens(Struct, frozen=True, omit_defaults=True):
    """Details of a prompt's tokens: those cached, those of media if there are any, and those that a sparse prefill
    kept.
    """

    cached_tokens: int
    image_tokens: int = 0
    video_tokens: int = 0
    audio_tokens: int = 0
    kept_tokens: int = 0


class CompletionTokens(Struct, frozen=True, omit_defaults=True):
    """Details of an answer's tokens. If the request has a prediction, its accepted and rejected tokens are
    counted too.
    """

    reasoning_tokens: int
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class UsageBody(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens


class TopLogprob(Struct, frozen=True):
    token: str
    bytes: list[int]
    logprob: float


class ContentLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class FunctionBody(Struct, frozen=True, omit_defaults=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Struct, frozen=True, omit_defaults=True):
    """A whole call in a message, or a piece of one in a chunk; only chunks have `index`."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    function: FunctionBody | UnsetType = UNSET


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionBody | UnsetType = UNSET
    refusal: UnsetType | None = UNSET


class ChatChunkChoice(Struct, frozen=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: TokenIds = UNSET


class PromptProgress(Struct, frozen=True):
    """Progress of a prompt in llama.cpp's form. The cached tokens are processed from the beginning on."""

    total: int
    cache: int
    processed: int
    time_ms: int

    @classmethod
    def of(cls, progress: Progress) -> "PromptProgress":
        return cls(progress.total, progress.cached, progress.processed, progress.elapsed_ms)


class ChatChunk(Struct, frozen=True, tag_field="object", tag="chat.completion.chunk"):
    """One chunk. `usage` is present only if requested; it is null in every chunk but the last."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_token_ids: TokenIds = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    x_mlxd: Extras = UNSET


class ChatMessage(Struct, frozen=True, tag_field="role", tag="assistant"):
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    function_call: FunctionBody | UnsetType = UNSET


class ChatChoice(Struct, frozen=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    token_ids: TokenIds = UNSET


class ChatCompletion(Struct, frozen=True, tag_field="object", tag="chat.completion"):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: PromptLogprobs = UNSET
    prompt_token_ids: TokenIds = UNSET
    x_mlxd: Extras = UNSET


class TextLogprobs(Struct, frozen=True):
    """Log-probabilities, one entry per token; the first token of a prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Struct, frozen=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    token_ids: TokenIds = UNSET
    prompt_logprobs: PromptLogprobs = UNSET
    prompt_token_ids: TokenIds = UNSET


class TextCompletion(Struct, frozen=True, tag_field="object", tag="text_completion"):
    """A whole completion, or one chunk of a stream. OpenAI uses the same form for both."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageBody | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    x_mlxd: Extras = UNSET


def finish_reason(finish: Finish) -> str:
    """Return OpenAI's finish reason for a sequence that ended without an error."""
    match finish:
        case Finish.STOP:
            return "stop"
        case Finish.LENGTH:
            return "length"
        case Finish.TOOL_CALLS:
            return "tool_calls"
        case Finish.ABORT | Finish.ERROR:
            raise ValueError(f"{finish!r} is reported as an error, not as a reason")


def sum_usage(usages: Iterable[Usage], choices_per_prompt: int) -> UsageBody:
    """Sum up the usage of all choices, in their order. A prompt that several choices share counts once."""
    prompt = cached = completion = reasoning = image = video = audio = accepted = rejected = kept = 0
    for index, usage in enumerate(usages):
        if index % choices_per_prompt == 0:
            prompt += usage.prompt
            cached += usage.cached
            image += usage.image_tokens
            video += usage.video_tokens
            audio += usage.audio_tokens
            kept += usage.kept
        completion += usage.completion
        reasoning += usage.reasoning
        accepted += usage.accepted
        rejected += usage.predicted - usage.accepted
    parts = PromptTokens(cached, image, video, audio, kept)
    details = CompletionTokens(reasoning, accepted, rejected)
    return UsageBody(prompt, completion, prompt + completion, parts, details)


def chat_logprobs(tokens: Iterable[TokenLogprob]) -> list[ContentLogprob]:
    return [
        ContentLogprob(
            token.token.decode("utf-8", "replace"),
            list(token.token),
            max(token.logprob, LOGPROB_MIN),
            [
                TopLogprob(top.decode("utf-8", "replace"), list(top), max(value, LOGPROB_MIN))
                for top, value in token.top
            ],
        )
        for token in tokens
    ]


class TextLogprobsBuilder:
    """Builds log-probabilities in the legacy form, token by token.

    `text_offset` counts characters of the text, even if a token ends inside a character.
    """

    def __init__(self) -> None:
        self._offset = 0
        self._pending = b""

    def build(self, text: str, tokens: Sequence[TokenLogprob]) -> TextLogprobs:
        """Build the entries of the next tokens, which come with `text`."""
        body = TextLogprobs([], [], [], [])
        is_added = _is_before(text.encode(), tokens)
        for at, token in enumerate(tokens):
            body.tokens.append(_token_text(token.token))
            body.text_offset.append(self._offset)
            if at or not is_added:
                self._advance(token.token)
            if math.isnan(token.logprob):
                body.token_logprobs.append(None)
                body.top_logprobs.append(None)
                continue
            body.token_logprobs.append(max(token.logprob, LOGPROB_MIN))
            top = {_token_text(text): max(value, LOGPROB_MIN) for text, value in token.top}
            # The sampled token is always included, even if it is unlikely.
            top.setdefault(_token_text(token.token), max(token.logprob, LOGPROB_MIN))
            body.top_logprobs.append(top)
        return body

    def _advance(self, token: bytes) -> None:
        self._pending += token
        text, self._pending = _split_utf8(self._pending)
        self._offset += len(text)


def _is_before(text: bytes, tokens: Sequence[TokenLogprob]) -> bool:
    """Whether the first token was put before the text of a prompt by the tokenizer, as <bos> is.

    The first token of a prompt has no log-probability, and comes with all of the prompt's text.
    """
    if not tokens or not math.isnan(tokens[0].logprob) or (text and text.startswith(tokens[0].token)):
        return False
    rest = b"".join(token.token for token in tokens[1:])
    return text.startswith(rest) or rest.startswith(text)


class TextLogprobsParts:
    """Legacy log-probabilities of a whole choice. They are kept as JSON, which takes much less memory than objects."""

    def __init__(self) -> None:
        self._builder = TextLogprobsBuilder()
        self._parts: dict[str, list[bytes]] = {name: [] for name in TextLogprobs.__struct_fields__}

    def add(self, text: str, tokens: Sequence[TokenLogprob]) -> None:
        """Add the next entries, which come with `text`."""
        if not tokens:
            return
        body = self._builder.build(text, tokens)
        for name, parts in self._parts.items():
            parts.append(_encode(getattr(body, name))[1:-1])

    def whole(self) -> TextLogprobs:
        """Return all entries, encoded. No method may be called after this."""
        fields = {name: Raw(b"[" + b",".join(parts) + b"]") for name, parts in self._parts.items()}
        self._parts.clear()
        # The types that the struct declares are only for the schema; the encoder does not check them.
        return TextLogprobs(**cast("dict[str, Any]", fields))


def _token_text(token: bytes) -> str:
    """Decode a token; one that ends inside a character is written as OpenAI does, `bytes:\\xe2\\x9c`."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _split_utf8(data: bytes) -> tuple[str, bytes]:
    """Split `data` into whole characters and the start of an incomplete one."""
    try:
        return data.decode("utf-8"), b""
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            return data[: error.start].decode("utf-8"), data[error.start :]
        return data.decode("utf-8", "replace"), b""
