"""Reading of request bodies, with a size limit, a time limit, and a reservation of their memory."""

import asyncio
from contextlib import nullcontext
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Receive, Scope

from gateway.errors import ApiError, BadRequest, BodyTooLarge
from gateway.request.body_memory import LARGE_BYTES
from gateway.request.record import ClientLeft, RequestRecord, record_of

BODY_TIMEOUT_S: Final = 120.0
# Memory is reserved in advance for at most this much of an announced body. Small bodies are reserved completely.
ADVANCE_RESERVE_BYTES: Final = LARGE_BYTES
_LENGTH_DIGITS: Final = 18


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read the whole body. Its first `ADVANCE_RESERVE_BYTES` are reserved in advance, and the rest as it arrives.

    Raises `BodyTooLarge` as soon as the size is known to exceed the limit, `ClientLeft`, `ApiError` 408, `RateLimited`
    or `Unavailable`.
    """
    record = record_of(scope)
    length = Headers(scope=scope).get("content-length", "")
    announced = 0
    if length.isdigit():
        # The number of digits is checked, because Python refuses to parse a number of thousands of digits.
        if len(length) > _LENGTH_DIGITS or int(length) > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        announced = int(length)
        await reserve(record, min(announced, ADVANCE_RESERVE_BYTES))
    meter = record.caller.meter
    with nullcontext() if meter is None else meter.receiving():
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _receive_all(record, receive, limit_bytes, announced)
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time.", code="request_timeout") from None
    record.body_bytes = len(body)
    if Headers(scope=scope).get("content-encoding", "identity") != "identity":
        raise BadRequest("Compressed request bodies are not supported.")
    # Some Windows tools write a byte order mark before JSON.
    return body.removeprefix(b"\xef\xbb\xbf")


async def _receive_all(record: RequestRecord, receive: Receive, limit_bytes: int, announced: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        if record.lease is not None and size > record.lease.size_bytes:
            await reserve(record, max(size, min(announced, size + ADVANCE_RESERVE_BYTES)))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def reserve(record: RequestRecord, size_bytes: int) -> None:
    """Increase the memory reserved for a request's body to this size. Raises `Unavailable` or `BodyTooLarge`."""
    if record.lease is not None:
        record.lease.owner = record.caller.key or ""
        await record.lease.reach(size_bytes)
