"""Server-sent events of OpenAI's streams, and a base class for its stream encoders."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gateway.errors import ApiError, BadRequest, openai_body

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
