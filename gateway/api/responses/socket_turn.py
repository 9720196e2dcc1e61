"""One response of a WebSocket: its request to the app, as a `POST` would be, and the input that steers it.

Messages on a WebSocket: what clients send, and what is sent besides the events of a response's stream.

Conversations that a WebSocket can continue although they are not stored: the newest of each stream, in memory.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from starlette.types import Message, Scope

from gateway.api.responses import response as out
from gateway.api.responses.encoder import ResponseEncoder, ResponseRun
from gateway.api.responses.request import ContentPart, InputItem, ResponsesRequest
from gateway.errors import ApiError, BadRequest, error_headers, missing_parameter, openai_body
from gateway.http.direct_write import KEY as WRITER_KEY
from gateway.http.websocket import GuardedWebSocket
from gateway.request.body_memory import BodyLease
from gateway.request.record import Header

KINDS: Final = ("response.create", "response.steer", "response.cancel")
STREAM_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
# Headers of an answer that say something about this answer, not about its transport.
_ABOUT_ANSWER: Final = (b"x-request-id", b"x-mlxd-", b"x-ratelimit-", b"retry-after", b"x-should-retry")
DATA: Final = b"\ndata: "
EVENT_END: Final = b"\n\n"


class ClientEvent(Struct, frozen=True):
    """A client's message, as far as it must be read to know what to do with it."""

    type: str = ""
    stream_id: str | None = None
    previous_response_id: str | None = None
    response_id: str | None = None


class SteeringMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """A user's message of `response.steer`."""

    role: Literal["user"]
    content: str | list[ContentPart]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None


class SteerRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Message of the type `response.steer`."""

    type: str
    previous_response_id: str
    input: str | list[SteeringMessage]


class SteerTarget(Struct, frozen=True):
    id: str
    previous_response_id: str


class UncommittedSteer(Struct, frozen=True):
    previous_response_id: str
    input: Raw
    id: str | UnsetType = UNSET


class SteerAccepted(Struct, frozen=True, tag="response.steer.accepted"):
    steer: SteerTarget


class RequiredOutput(Struct, frozen=True):
    """Form of an item that the client fills in with the result of a call."""

    type: str
    call_id: str
    name: str | UnsetType = UNSET


class SteerPending(Struct, frozen=True, tag="response.steer.pending"):
    steer: SteerTarget
    required_input: Sequence[RequiredOutput]
    reason: str = "waiting_for_required_input"


class SteerErrorInfo(Struct, frozen=True):
    code: str
    message: str
    type: str = "invalid_request_error"


class SteerFailed(Struct, frozen=True, tag="response.steer.failed"):
    steer: UncommittedSteer
    error: SteerErrorInfo


_event = msgspec.json.Decoder(ClientEvent)
_steer = msgspec.json.Decoder(SteerRequest)
_fields = msgspec.json.Decoder(dict[str, Raw])
_encode = msgspec.json.Encoder().encode


def decode_event(message: str) -> tuple[ClientEvent, bytes]:
    """Return a client's event and its bytes. Raises `BadRequest`."""
    data = message.encode()
    try:
        event = _event.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        what = str(error).replace("`", "'") if isinstance(error, msgspec.DecodeError) else "it is nested too deeply"
        raise BadRequest(f"The message is not a valid event: {what}.", code="invalid_event") from None
    if not event.type:
        raise missing_parameter("type")
    if event.stream_id is not None and not STREAM_ID.fullmatch(event.stream_id):
        message = "'stream_id' must have 1 to 256 letters, digits, underscores, hyphens or periods."
        raise BadRequest(message, "stream_id", "invalid_stream_id")
    return event, data


def decode_steer(data: bytes) -> tuple[list[InputItem], Raw]:
    """Return the new input of a `response.steer`, as items and as it was sent. Raises `BadRequest`."""
    try:
        request = _steer.decode(data)
    except msgspec.ValidationError as error:
        raise BadRequest(f"Invalid steering: {str(error).replace('`', chr(39))}.", code="invalid_input") from None
    if not request.input:
        raise BadRequest("Invalid steering: 'input' is empty.", "input", "invalid_input")
    if isinstance(request.input, str):
        items = [InputItem("message", role="user", content=[ContentPart("input_text", request.input)])]
    else:
        items = [InputItem("message", each.id, each.role, each.content) for each in request.input]
    return items, input_of(data)


def input_of(data: bytes) -> Raw:
    """Return the `input` of an event as it was sent; null if it has none."""
    return _fields.decode(data).get("input", Raw(b"null"))


def messages_of(events: bytes, stream_id: str, headers: Iterable[Header] = ()) -> Iterator[bytes]:
    """Yield the server-sent events of a response as messages. The first one gets the answer's headers, and each one the
    id of a named stream.
    """
    for event in events.split(EVENT_END):
        _, mark, data = event.partition(DATA)
        if mark:
            yield with_fields(data, additions(stream_id, headers))
            headers = ()


def additions(stream_id: str, headers: Iterable[Header] = ()) -> dict[str, Any]:
    """Return the fields that a message has besides those of its event."""
    more: dict[str, Any] = {"headers": told} if (told := headers_about(headers)) else {}
    return more | ({"stream_id": stream_id} if stream_id else {})


def error_message(status: int, body: bytes, headers: Iterable[Header], stream_id: str | None) -> bytes:
    """Return the event for an answer with an error's status."""
    error: dict[str, Any] = msgspec.json.decode(body)["error"]
    if told := headers_about(headers):
        error["headers"] = told
    more = {"stream_id": stream_id} if stream_id else {}
    return _encode({"type": "error", "status": status, "error": error, **more})


def error_event(error: ApiError, stream_id: str | None) -> bytes:
    """Return the event of an error that no request has caused."""
    return error_message(error.status, openai_body(error), error_headers(error), stream_id)


def headers_about(headers: Iterable[Header]) -> dict[str, str]:
    """Return the headers that clients of HTTP read beside an answer."""
    return {name.decode(): value.decode() for name, value in headers if name.lower().startswith(_ABOUT_ANSWER)}


def with_fields(data: bytes, more: dict[str, Any]) -> bytes:
    """Return a JSON object, or its last piece, with more fields."""
    return data[:-1] + b"," + _encode(more)[1:] if more else data


# A failed response cannot be continued.
_CONTINUED: Final = frozenset({"completed", "incomplete", "cancelled"})

_items = msgspec.json.Decoder(list[InputItem])


@dataclass(frozen=True, slots=True, eq=False)
class SocketConversation:
    """All items up to a response's last one, and their approximate size as JSON."""

    response_id: str
    items: list[InputItem]
    size_bytes: int
    lease: BodyLease


class ConversationMemory:
    """Memory of the conversations of all WebSockets, a part of that for request bodies. If there is no room, the oldest
    conversations are dropped.
    """

    def __init__(self, lease: Callable[[], BodyLease], limit_bytes: Callable[[], int]) -> None:
        self.lease = lease
        self._limit_bytes = limit_bytes
        self._used_bytes = 0
        # Functions that drop the conversations, the oldest first.
        self._kept: dict[SocketConversation, Callable[[], None]] = {}

    def hold(self, kept: SocketConversation, drop: Callable[[], None]) -> bool:
        """Reserve memory for a conversation. Returns False if there is none; `drop` must call `release` later."""
        limit = self._limit_bytes()
        while self._kept and self._used_bytes + kept.size_bytes > limit:
            next(iter(self._kept.values()))()
        if kept.size_bytes > limit or not kept.lease.hold(kept.size_bytes):
            return False
        self._kept[kept] = drop
        self._used_bytes += kept.size_bytes
        return True

    def release(self, kept: SocketConversation) -> None:
        del self._kept[kept]
        self._used_bytes -= kept.size_bytes
        kept.lease.close()


class SocketHistory:
    """The newest conversation of each stream of one WebSocket."""

    def __init__(self, memory: ConversationMemory, owner: str) -> None:
        self._memory = memory
        self._owner = owner
        self._newest: dict[str, SocketConversation] = {}

    def find(self, response_id: str) -> SocketConversation | None:
        """Return the conversation that ends with this response."""
        return next((each for each in self._newest.values() if each.response_id == response_id), None)

    def keep(self, stream: str, response: out.Response, before: list[InputItem], size_bytes: int) -> None:
        """Keep a response that follows the items `before`, in place of the stream's earlier one.

        If there is no memory for it, it cannot be continued.
        """
        if response.status not in _CONTINUED:
            return
        output = _encode(response.output)
        lease = self._memory.lease()
        lease.owner = self._owner
        items = [*before, *_items.decode(output)]
        kept = SocketConversation(response.id, items, size_bytes + len(output), lease)
        self._drop(stream)
        if self._memory.hold(kept, lambda: self._drop(stream)):
            self._newest[stream] = kept

    def evict(self, stream: str, response_id: str | None) -> None:
        """Drop the stream's conversation if it ends with this response."""
        kept = self._newest.get(stream)
        if kept is not None and kept.response_id == response_id:
            self._drop(stream)

    def close(self) -> None:
        """Drop all conversations."""
        for stream in list(self._newest):
            self._drop(stream)

    def _drop(self, stream: str) -> None:
        kept = self._newest.pop(stream, None)
        if kept is not None:
            self._memory.release(kept)


def as_input(output: Sequence[out.Item]) -> list[InputItem]:
    """Return output items in the form in which a client sends them back."""
    return _items.decode(_encode(output))


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
