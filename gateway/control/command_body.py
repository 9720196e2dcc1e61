"""Bodies of commands on the control socket and the web page."""

from typing import Final, TypeVar

import msgspec
from starlette.types import Receive, Scope

from gateway.errors import BadRequest
from gateway.http.request_body import read_body
from protocol.codec import UNREADABLE

T = TypeVar("T")

BODY_BYTES_MAX: Final = 64 * 1024


async def read_order(
    scope: Scope, receive: Receive, decoder: "msgspec.json.Decoder[T]", expected: str = "The body cannot be read"
) -> T:
    """Decode the body of a command. Raises `BadRequest` with the error and what was expected."""
    body = await read_body(scope, receive, BODY_BYTES_MAX)
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        raise BadRequest(f"{expected}: {error}.") from None
