"""Answers of Ollama's API. Each is one line of JSON; a stream has several lines. Durations are in nanoseconds.

Ollama's answers: the canonical events encoded as lines of a stream, or folded into one answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, assert_never

import msgspec
from msgspec import UNSET, Struct, UnsetType, structs

from gateway.api.common.request_fields import Extras, MakeExtras, no_extras
from gateway.api.ollama.request import ConversationTurn, write_context
from gateway.api.openai.response import ContentLogprob, chat_logprobs
from gateway.errors import ApiError
from gateway.request.record import RequestRecord
from protocol.from_worker import Delta, DeltaKind, Finish, Usage

DONE_REASONS: Final = {Finish.STOP: "stop", Finish.TOOL_CALLS: "stop", Finish.LENGTH: "length"}


class OllamaFunction(Struct, frozen=True):
    """A function with its arguments, which are a JSON object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaToolCall(Struct, frozen=True):
    """A whole call."""

    id: str
    function: OllamaFunction


class OllamaMessage(Struct, frozen=True, omit_defaults=True):
    """A piece of the answer, or all of it."""

    role: str
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaToolCall] | UnsetType = UNSET


class OllamaLine(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Fields that lines of chats and completions share. Those from `done_reason` on are only in the last line."""

    model: str
    created_at: str
    logprobs: list[ContentLogprob] | UnsetType = UNSET
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    x_mlxd: Extras = UNSET


class ChatLine(OllamaLine, frozen=True, kw_only=True):
    """A line of `POST /api/chat`, or its whole answer."""

    message: OllamaMessage
    done: bool


class GenerateLine(OllamaLine, frozen=True, kw_only=True):
    """A line of `POST /api/generate`, or its whole answer. The client sends `context`, the conversation, with its next
    request.
    """

    response: str
    done: bool
    thinking: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET


class PullLine(Struct, frozen=True, omit_defaults=True):
    """Progress of a download. `success` is the last status."""

    status: str
    digest: str | UnsetType = UNSET
    total: int | UnsetType = UNSET
    completed: int | UnsetType = UNSET


class ErrorLine(Struct, frozen=True):
    """An error answer, and the last line of a stream that failed."""

    error: str


def ollama_body(error: ApiError) -> bytes:
    """Return the JSON body of an error answer."""
    return msgspec.json.encode(ErrorLine(error.message))


def timestamp(at: datetime | None = None) -> str:
    """Format a time as Ollama does. The default is the current time."""
    return (at or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def arguments_of(text: str) -> Mapping[str, Any] | None:
    """Decode a call's arguments; None if they are incomplete because the answer was cut off."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError:
        return None


_encode: Final = msgspec.json.Encoder().encode
_EMPTY: Final = Usage(0, 0, 0)
_TEXT: Final = DeltaKind.TEXT


class SentText(Struct, frozen=True):
    """Content of a line."""

    text: str = ""
    thinking: str = ""
    calls: tuple[OllamaToolCall, ...] = ()
    logprobs: tuple[ContentLogprob, ...] = ()


_NOTHING: Final = SentText()


@dataclass(slots=True)
class AnswerSoFar:
    """The answer so far, without its thinking."""

    texts: list[str] = field(default_factory=list[str])
    # The tool call that is not complete yet, and the pieces of its arguments.
    call: OllamaToolCall | None = None
    arguments: list[str] = field(default_factory=list[str])
    finish: Finish = Finish.STOP
    usage: Usage = _EMPTY

    def add(self, delta: Delta) -> SentText | None:
        """Return the content that a delta adds, or None. A tool call is returned only when it is complete."""
        if delta.finish is not None:
            self.finish, self.usage = delta.finish, delta.usage or _EMPTY
        logprobs = tuple(chat_logprobs(delta.logprobs)) if delta.logprobs is not None else ()
        match delta.kind:
            case DeltaKind.TEXT:
                self.texts.append(delta.text)
                content = SentText(delta.text, logprobs=logprobs)
            case DeltaKind.REASONING:
                content = SentText(thinking=delta.text, logprobs=logprobs)
            case DeltaKind.TOOL_BEGIN:
                assert delta.tool is not None
                self.call = OllamaToolCall(delta.tool.call_id, OllamaFunction(delta.tool.index, delta.tool.name, {}))
                self.arguments.clear()
                content = SentText(logprobs=logprobs)
            case DeltaKind.TOOL_ARGS:
                self.arguments.append(delta.text)
                content = SentText(logprobs=logprobs)
            case DeltaKind.TOOL_END:
                content = SentText(calls=self._whole_call(), logprobs=logprobs)
            case _:
                assert_never(delta.kind)
        return content if content != _NOTHING else None

    def _whole_call(self) -> tuple[OllamaToolCall, ...]:
        assert self.call is not None
        arguments = arguments_of("".join(self.arguments))
        if arguments is None:
            return ()
        function = structs.replace(self.call.function, arguments=dict(arguments))
        return (OllamaToolCall(self.call.id, function),)


class LineForm(ABC):
    """Format of one endpoint's lines. `key` is the field with the text."""

    key: str

    def __init__(self, model: str, record: RequestRecord, extras: MakeExtras = no_extras) -> None:
        self._model = model
        self._record = record
        self._extras = extras
        self._created_at = timestamp()

    @abstractmethod
    def line(self, content: SentText, answer: AnswerSoFar | None = None) -> OllamaLine:
        """Make one line of the stream.

        `answer` is passed only for the last line, which reports its usage and durations.
        """

    def loaded(self, reason: str) -> OllamaLine:
        """Make the only line of the answer to a request that loads or unloads a model."""
        return structs.replace(self.line(_NOTHING), created_at=timestamp(), done=True, done_reason=reason)

    def _shared_fields(self, content: SentText, answer: AnswerSoFar | None) -> dict[str, Any]:
        """Return the fields that the lines of both endpoints have."""
        shared: dict[str, Any] = {"model": self._model, "created_at": self._created_at, "done": answer is not None}
        if content.logprobs:
            shared["logprobs"] = list(content.logprobs)
        if answer is None:
            return shared
        usage = answer.usage
        return shared | {
            "created_at": timestamp(),
            "done_reason": DONE_REASONS.get(answer.finish, "stop"),
            "total_duration": nanoseconds(self._record.clock() - self._record.started),
            "load_duration": nanoseconds(self._record.phases.load),
            "prompt_eval_count": usage.prompt,
            "prompt_eval_duration": nanoseconds(usage.prefill_ms / 1000),
            "eval_count": usage.completion,
            "eval_duration": nanoseconds(usage.decode_ms / 1000),
            "x_mlxd": self._extras(),
        }


class ChatForm(LineForm):
    """Lines of `/api/chat`."""

    key = "content"

    def line(self, content: SentText, answer: AnswerSoFar | None = None) -> OllamaLine:
        calls = list(content.calls) if content.calls else UNSET
        message = OllamaMessage("assistant", content.text, content.thinking or UNSET, calls)
        return ChatLine(message=message, **self._shared_fields(content, answer))


class GenerateForm(LineForm):
    """Lines of `/api/generate`.

    `turns` is the conversation before the answer; with None, the last line has no `context`.
    """

    key = "response"

    def __init__(
        self,
        model: str,
        record: RequestRecord,
        turns: list[ConversationTurn] | None,
        extras: MakeExtras = no_extras,
    ) -> None:
        super().__init__(model, record, extras)
        self._turns = turns

    def line(self, content: SentText, answer: AnswerSoFar | None = None) -> OllamaLine:
        context: list[int] | UnsetType = UNSET
        if answer is not None and self._turns is not None:
            context = write_context([*self._turns, ConversationTurn("assistant", "".join(answer.texts))])
        shared = self._shared_fields(content, answer)
        return GenerateLine(response=content.text, thinking=content.thinking or UNSET, context=context, **shared)


class LineStream:
    """`StreamEncoder` that sends lines. Most lines carry a piece of text; such a line is a prebuilt prefix, the text
    and a prebuilt suffix.
    """

    def __init__(self, form: LineForm) -> None:
        self._form = form
        self._answer = AnswerSoFar()
        blank = _encode(form.line(_NOTHING)) + b"\n"
        self._blank = blank
        # Quotes inside a string are escaped, so only the key itself can match.
        head, key, self._after = blank.partition(f'"{form.key}":""'.encode())
        self._before = head + key[:-2]

    def bind(self, rids: Sequence[int]) -> None:
        assert len(rids) == 1, "an answer is one sequence"

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def encode(self, deltas: Sequence[Delta]) -> bytes:
        parts: list[bytes] = []
        for delta in deltas:
            if delta.kind is _TEXT and delta.finish is None and delta.logprobs is None:
                if delta.text:
                    self._answer.texts.append(delta.text)
                    parts += (self._before, _encode(delta.text), self._after)
            elif (content := self._answer.add(delta)) is not None:
                parts.append(_encode(self._form.line(content)) + b"\n")
        return b"".join(parts)

    def keepalive(self) -> bytes:
        # An empty line would break clients that decode every line.
        return self._blank

    def error(self, error: ApiError) -> bytes:
        return _encode(ErrorLine(error.message)) + b"\n"

    def end(self) -> bytes:
        return _encode(self._form.line(_NOTHING, self._answer)) + b"\n"


class LineFold:
    """`Fold` of one line with the same content as `LineStream`."""

    def __init__(self, form: LineForm) -> None:
        self._form = form
        self._answer = AnswerSoFar()
        self._sent: list[SentText] = []

    def bind(self, rids: Sequence[int]) -> None:
        self._answer = AnswerSoFar()
        self._sent.clear()

    def add(self, deltas: Sequence[Delta]) -> None:
        self._sent += [content for delta in deltas if (content := self._answer.add(delta)) is not None]

    def result(self) -> bytes:
        whole = SentText(
            "".join(self._answer.texts),
            "".join(content.thinking for content in self._sent),
            tuple(call for content in self._sent for call in content.calls),
            tuple(logprob for content in self._sent for logprob in content.logprobs),
        )
        return _encode(self._form.line(whole, self._answer))
