"""Orders of a session of the page: their bodies, and their lines in the audit log."""

from typing import Final, TypeVar

import msgspec
from starlette.types import Receive, Scope

from gateway.errors import BadRequest
from gateway.http.exchange import read_body

T = TypeVar("T")

BODY_MAX: Final = 64 * 1024


async def read_order(scope: Scope, receive: Receive, decoder: msgspec.json.Decoder[T]) -> T:
    """The body of a request. Raises `BadRequest`, which says what is wrong with it."""
    body = await read_body(scope, receive, BODY_MAX)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The body cannot be read: {error}.") from None
