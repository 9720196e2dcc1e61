"""Messages on a WebSocket: what clients send, and what is sent besides the events of a response's stream."""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from gateway.api.responses.request import ContentPart, InputItem
from gateway.errors import ApiError, BadRequest, error_headers, missing_parameter, openai_body
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
