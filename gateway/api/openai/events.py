"""Server-sent events of OpenAI's streams, and the defaults that its stream encoders share."""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import Struct

from gateway.errors import ApiError, openai_body

_encode: Final = msgspec.json.Encoder().encode


class EventEncoder:
    """Defaults of a `StreamEncoder` for a request that has one sequence and sends no events before its first delta."""

    def bind(self, rids: Sequence[int]) -> None:
        """Ignore the rid, as a request has only one."""

    def begin(self, prompt_tokens: int) -> bytes:
        return b""

    def keepalive(self) -> bytes:
        return b": keepalive\n\n"

    def error(self, error: ApiError) -> bytes | None:
        return b"data: " + openai_body(error) + b"\n\n"


def event(data: Struct) -> bytes:
    """Encode one event."""
    return b"data: " + _encode(data) + b"\n\n"
