"""Parts of HTTP that all endpoints share: reading a body within a limit, and sending one whole answer."""

import asyncio
from contextlib import nullcontext
from typing import Final

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from gateway.errors import ApiError, BadRequest, BodyTooLarge
from gateway.request.bodies import LARGE_BYTES
from gateway.request.record import ClientLeft, Dialect, Header, RequestRecord, record_of

JSON: Final = b"application/json"
# Browsers must not treat an answer as a page, whatever text it quotes.
_NO_SNIFF: Final[Header] = (b"x-content-type-options", b"nosniff")
BODY_TIMEOUT_S: Final = 120.0
# A request reserves memory for at most this much of its announced body in advance; small bodies are reserved
# completely.
ADVANCE_RESERVE_BYTES: Final = LARGE_BYTES
_LENGTH_DIGITS: Final = 18
# The transport buffers all that its client has not read, so a large answer is sent in slices of this size.
SLICE_BYTES: Final = 64 * 1024
# nginx's status for a client that has left before its answer.
CLIENT_CLOSED: Final = 499


class ResponseSender:
    """Wrapper of `send` that adds the middleware's headers and records the status."""

    __slots__ = ("_record", "inner", "is_started")

    def __init__(self, send: Send, record: RequestRecord) -> None:
        self.inner = send
        self._record = record
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.is_started = True
            record = self._record
            record.status = message["status"]
            headers: list[Header] = [*message.get("headers", []), *record.always]
            if record.late_headers is not None:
                headers += record.late_headers()
            headers += (_NO_SNIFF, (b"x-request-id", record.id.encode()))
            if record.dialect is Dialect.ANTHROPIC:
                headers.append((b"request-id", record.id.encode()))
            message["headers"] = headers
        await self.inner(message)


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """Read the whole body. Memory is reserved as the body arrives, and for `ADVANCE_RESERVE_BYTES` of it in advance.

    Raises `BodyTooLarge` as soon as the size is known to exceed the limit, `ClientLeft`, `ApiError` 408, `RateLimited`
    or `Unavailable`.
    """
    record = record_of(scope)
    length = Headers(scope=scope).get("content-length", "")
    announced = 0
    if length.isdigit():
        # Python refuses to parse a number of thousands of digits.
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


def came_to(scope: Scope, port: int) -> bool:
    """Whether a request arrived at this port of the daemon; False for port 0."""
    server = scope.get("server")
    return bool(port) and server is not None and server[1] == port


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON response, for an endpoint that returns responses; ASGI endpoints use `send_body`."""
    return Response(msgspec.json.encode(value), status, media_type=JSON.decode())


async def send_body(
    send: Send, status: int, body: bytes, headers: list[Header] | None = None, kind: bytes = JSON
) -> None:
    """Send one whole answer."""
    sent: list[Header] = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    last = max(0, len(body) - 1) // SLICE_BYTES * SLICE_BYTES
    for at in range(0, last, SLICE_BYTES):
        await send({"type": "http.response.body", "body": body[at : at + SLICE_BYTES], "more_body": True})
    await send({"type": "http.response.body", "body": body[last:], "more_body": False})
