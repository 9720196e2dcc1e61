"""Parts of HTTP that all endpoints share: reading a body within a limit, and sending one whole answer."""

from collections.abc import Sequence
from typing import Final

import msgspec
from starlette.responses import Response
from starlette.types import Message, Scope, Send

from gateway.request.record import Dialect, Header, RequestRecord

JSON: Final = b"application/json"
# Browsers do not treat an answer with this header as a page, whatever text it quotes.
_NO_SNIFF: Final[Header] = (b"x-content-type-options", b"nosniff")
# The transport buffers whatever the client has not read, so a large answer is sent in slices of this size.
SLICE_BYTES: Final = 64 * 1024
# nginx uses this status if a client leaves before it gets its answer.
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


def came_to(scope: Scope, port: int) -> bool:
    """Whether a request arrived at this port of the daemon; False for port 0."""
    server = scope.get("server")
    return bool(port) and server is not None and server[1] == port


def json_response(value: object, status: int = 200) -> Response:
    """Return a JSON response. Only for endpoints that return responses; ASGI endpoints use `send_body`."""
    return Response(msgspec.json.encode(value), status, media_type=JSON.decode())


async def send_body(
    send: Send, status: int, body: bytes, headers: list[Header] | None = None, kind: bytes = JSON
) -> None:
    """Send one whole answer."""
    await send_parts(send, status, [memoryview(body)], headers, kind)


async def send_parts(
    send: Send,
    status: int,
    parts: Sequence[memoryview],
    headers: list[Header] | None = None,
    kind: bytes = JSON,
) -> None:
    """Send one whole answer that is not in one place in memory."""
    size = sum(map(len, parts))
    sent: list[Header] = [(b"content-type", kind), (b"content-length", str(size).encode()), *(headers or [])]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    slices = [part[at : at + SLICE_BYTES] for part in parts for at in range(0, len(part), SLICE_BYTES)]
    for piece in slices[:-1]:
        await send({"type": "http.response.body", "body": bytes(piece), "more_body": True})
    await send({"type": "http.response.body", "body": bytes(slices[-1]) if slices else b"", "more_body": False})
