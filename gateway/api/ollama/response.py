"""Answers of Ollama's API. Each is one line of JSON; a stream has several lines. Durations are in nanoseconds."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from gateway.api.common.extras import Extras
from gateway.api.openai.response import ContentLogprob
from gateway.errors import ApiError
from protocol.from_worker import Finish

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
