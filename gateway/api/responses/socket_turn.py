"""One response of a WebSocket: its request to the app, as a `POST` would be, and the input that steers it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Raw
from starlette.types import Message, Scope

from gateway.api.responses import response as out
from gateway.api.responses.encoder import ResponseEncoder, ResponseRun
from gateway.api.responses.request import InputItem, ResponsesRequest
from gateway.api.responses.socket_events import (
    DATA,
    EVENT_END,
    additions,
    error_message,
    messages_of,
    with_fields,
)
from gateway.api.responses.socket_history import SocketConversation, SocketHistory, as_input
from gateway.http.direct_write import KEY as WRITER_KEY
from gateway.http.websocket import GuardedWebSocket
from gateway.request.body_memory import BodyLease
from gateway.request.record import Header

PATH: Final = "/v1/responses"
KEY: Final = "mlxd.turn"
# The handshake's headers of these names say nothing about a response. The others, such as the key, count for each one.
_HANDSHAKE: Final = frozenset(
    {b"connection", b"upgrade", b"expect", b"x-request-id", b"transfer-encoding", b"content-encoding"}
    | {b"content-length", b"content-type"}
)


@dataclass(frozen=True, slots=True)
class SteerInput:
    """Accepted input, as the client sent it and as items."""

    id: str
    sent: Raw
    items: list[InputItem]


@dataclass(slots=True)
class SocketTurn:
    """A response from its message to its last event. The socket's tasks own it; the endpoint calls `begin`.

    `stream` is the name of its stream, empty for the default one. `waiting` has the stream's steering that waits for
    the output of tools, by the response that called them. The response commits the steering in `carried` and `waited`;
    that in `steers` is for the response after it. `find_running` finds a response that the socket generates.
    """

    stream: str
    data: bytes
    lease: BodyLease | None
    history: SocketHistory
    waiting: dict[str, list[SteerInput]]
    previous: str | None
    find_running: "Callable[[str], SocketTurn | None]"
    carried: list[SteerInput] = field(default_factory=list[SteerInput])
    waited: list[SteerInput] = field(default_factory=list[SteerInput])
    steers: list[SteerInput] = field(default_factory=list[SteerInput])
    request: ResponsesRequest | None = None
    run: ResponseRun | None = None
    encoder: ResponseEncoder | None = None
    is_cancelled: bool = False
    # All items before the response's own.
    before: list[InputItem] = field(default_factory=list[InputItem])

    @property
    def response_id(self) -> str | None:
        return None if self.run is None else self.run.response.id

    def steered(self, request: ResponsesRequest) -> ResponsesRequest:
        """Return the request with the steering before its input that waited for it."""
        self.waited = self.waiting.pop(self.previous or "", [])
        more = [item for steer in self.waited for item in steer.items]
        return msgspec.structs.replace(request, input=[*more, *request.items]) if more else request

    def origin(self, response_id: str | None) -> "SocketTurn | None":
        """Return the running response with this id, which the response of this turn forks."""
        return None if response_id is None else self.find_running(response_id)

    def so_far(self) -> list[InputItem]:
        """Return the conversation with the response's output so far."""
        return self.before if self.run is None else [*self.before, *as_input(self.run.output.items())]

    def conversation(self, response_id: str | None) -> SocketConversation | None:
        """Return a conversation that is known on this socket."""
        return None if response_id is None else self.history.find(response_id)

    def begin(
        self, request: ResponsesRequest, before: list[InputItem], run: ResponseRun, encoder: ResponseEncoder
    ) -> None:
        """Take the parts of the response, whose first event follows. `before` are the items before the request's."""
        # The response has large instructions encoded.
        self.request = msgspec.structs.replace(request, instructions=run.response.instructions)
        self.run, self.encoder = run, encoder
        self.before = [*before, *request.items]
        if self.is_cancelled:
            run.cancel()

    def cancel(self) -> None:
        """Cancel the response, now or as soon as it begins."""
        self.is_cancelled = True
        if self.run is not None:
            self.run.cancel()

    def keeper(self, items: list[InputItem], size_bytes: int) -> Callable[[out.Response], None]:
        """Return a function that keeps the response for the socket's next request, after the items before it."""

        def keep(response: out.Response) -> None:
            self.history.keep(self.stream, response, items, size_bytes)

        return keep

    def successor(self) -> bytes:
        """Return the request of the response that continues this one with its steering."""
        assert self.request is not None
        items = [item for steer in self.steers for item in steer.items]
        return msgspec.json.encode(
            msgspec.structs.replace(self.request, input=items, previous_response_id=self.response_id)
        )


class SocketExchange:
    """The request and the answer of one turn, between the app and a WebSocket.

    `status` is 0 before the answer. `refusal` is the event for an answer that is not a stream.
    """

    def __init__(self, socket: GuardedWebSocket, turn: SocketTurn, left: asyncio.Event) -> None:
        self._socket = socket
        self._turn = turn
        self._left = left
        self._is_sent = False
        self._headers: Sequence[Header] = ()
        self._body = b""
        self._is_within_event = False
        # Whether this exchange keeps others from writing to the socket.
        self._has_socket = False
        # The end of the bytes so far, if more of their event follows.
        self._rest = b""
        self._is_within_message = False
        self.status = 0
        self.is_complete = False
        self.refusal = b""

    def scope(self, handshake: Scope, request_id: str) -> Scope:
        """Return the scope of the turn's request, which has the key of the socket's handshake."""
        headers = [
            (name, value)
            for name, value in handshake["headers"]
            if name not in _HANDSHAKE and not name.startswith(b"sec-websocket-")
        ]
        headers += [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(self._turn.data)).encode()),
            (b"x-request-id", request_id.encode()),
        ]
        kept = {name: handshake[name] for name in ("asgi", "http_version", "server", "client", "root_path")}
        return kept | {
            "type": "http",
            "scheme": "https" if handshake["scheme"] == "wss" else "http",
            "method": "POST",
            "path": PATH,
            "raw_path": PATH.encode(),
            "query_string": b"",
            "headers": headers,
            "state": {},
            KEY: self._turn,
            WRITER_KEY: self,
        }

    async def receive(self) -> Message:
        if not self._is_sent:
            self._is_sent = True
            # The endpoint drops the body as soon as it is decoded.
            body, self._turn.data = self._turn.data, b""
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self._headers = message["status"], message["headers"]
        elif self.status == 200:
            self.is_complete = not message.get("more_body", False)
            await self.send_events(message["body"])
        else:
            self._body += message["body"]
            if not message.get("more_body", False):
                self.is_complete = True
                self.refusal = error_message(self.status, self._body, self._headers, self._turn.stream)

    async def send_events(self, events: bytes) -> None:
        """Send events as messages. While `is_within_event` is set, they may be cut off anywhere, and go on in the next
        call.
        """
        if not self.is_within_event:
            await self._socket.send_text(self._messages(events))
            return
        if not self._has_socket:
            # The events are numbered, so that none of the same response may come between them.
            await self._socket.begin_pieces()
            self._has_socket = True
        *whole, rest = (self._rest + events).split(EVENT_END)
        for event in whole:
            await self._send_piece(event, is_last=True)
        # Something may be added before the last byte of a message, so that byte waits for the event's end.
        self._rest = rest[-len(EVENT_END) :]
        if len(rest) > len(EVENT_END):
            await self._send_piece(rest[: -len(EVENT_END)], is_last=False)

    async def _send_piece(self, data: bytes, *, is_last: bool) -> None:
        is_first = not self._is_within_message
        if is_first:
            data = data.partition(DATA)[2]
        if is_last:
            headers, self._headers = self._headers, ()
            data = with_fields(data, additions(self._turn.stream, headers))
        self._is_within_message = not is_last
        await self._socket.send_piece(data, is_first=is_first, is_last=is_last)

    def close(self) -> None:
        """Let others write to the socket. If a message is cut off, the connection must be dropped before they do."""
        self._is_within_event = False
        if self._has_socket:
            self._has_socket = False
            self._socket.end_pieces()

    @property
    def is_within_event(self) -> bool:
        """Whether a part of events was sent, as that of `DirectWriter`."""
        return self._is_within_event

    @is_within_event.setter
    def is_within_event(self, is_within: bool) -> None:
        self._is_within_event = is_within
        if not is_within:
            self.close()

    @property
    def is_open(self) -> bool:
        return self._socket.is_open

    def write(self, data: bytes) -> None:
        """Write events without ASGI's `send`, as `DirectWriter` does."""
        self._socket.write(self._messages(data))

    def _messages(self, events: bytes) -> list[bytes]:
        headers, self._headers = self._headers, ()
        messages = list(messages_of(events, self._turn.stream, headers))
        if not messages:
            self._headers = headers
        return messages


def turn_of(scope: Scope) -> SocketTurn | None:
    """Return the turn of a request that came by a WebSocket; None for any other."""
    return scope.get(KEY)
