"""Codec of messages and frames. A bad frame raises `MalformedFrame`, a message that cannot be encoded `Unsendable`."""

import re
from collections.abc import Sequence
from typing import Final, TypeVar, cast

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocol.from_worker import Up
from protocol.to_worker import Down, Generate, Prompt, Sampling

T = TypeVar("T")

# libzmq treats a larger frame as a protocol error and closes the connection, so neither side may send one.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
# Approximate number of bytes per token of English text and code, for estimating a prompt's tokens from its size.
BYTES_PER_TOKEN: Final = 4

# Errors of msgspec for bytes that are not a message: not its format, not UTF-8, or nested too deeply.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


class MalformedFrame(ValueError):
    """Raised for a frame that is not a message of this protocol."""


class RefusedRequest(MalformedFrame):
    """Raised for a `Generate` that has a value of the wrong type or out of range in its field `param`."""

    def __init__(self, rid: int, message: str, param: str) -> None:
        super().__init__(message)
        self.rid = rid
        self.param = param


class Unsendable(ValueError):
    """Raised for a message that cannot be encoded: a number beyond 64 bits, a lone surrogate, too deep nesting."""


class FrameTooLarge(Unsendable):
    """Raised for a message whose frame is larger than `MAX_FRAME_BYTES`."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"a frame of {size_bytes} bytes; at most {MAX_FRAME_BYTES} can be sent")
        self.size_bytes = size_bytes


def encode(message: Down | Up) -> bytes:
    """Encode a message to its frame. Raises `Unsendable`, including `FrameTooLarge`."""
    frame = _encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(frame))
    return frame


def _encode(value: Down | Up | Prompt) -> bytes:
    try:
        return _encoder.encode(value)
    except (OverflowError, RecursionError, UnicodeEncodeError, TypeError) as error:
        raise Unsendable(str(error)) from error


def pack(requests: Sequence[Generate]) -> list[Generate]:
    """Encode the prompts of requests before sending; requests that share a prompt also share its encoding.

    Return the requests with encoded prompts. Raises `Unsendable`.
    """
    packed: dict[int, Raw] = {}
    for request in requests:
        if id(request.prompt) not in packed:
            packed[id(request.prompt)] = Raw(_encode(request.prompt))
    # The encoder inserts the raw prompt; no other code reads the prompt of a request that will be sent.
    return [replace(request, prompt=cast(Prompt, packed[id(request.prompt)])) for request in requests]


def prompt_bytes(request: Generate) -> int:
    """Return the size of a request's prompt and questions in its frame."""
    prompt = cast(Prompt | Raw, request.prompt)
    asked = sum(len(question.text.encode()) for question in request.questions)
    return asked + (len(memoryview(prompt)) if isinstance(prompt, Raw) else len(_encode(prompt)))


def decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes) -> T:
    """Decode a frame. Raises `MalformedFrame`."""
    try:
        return decoder.decode(frame)
    except UNREADABLE as error:
        raise MalformedFrame(str(error)) from error


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """Beginning of a request."""

    tag: int
    rid: int


_head = msgspec.msgpack.Decoder(_Head)
# An index in msgspec's path of a value.
_INDEX: Final = re.compile(r"\[(\d+)\]")


def decode_down(frame: bytes) -> Down:
    """Decode a message from the gateway. Raises `MalformedFrame`, and `RefusedRequest` for a request."""
    try:
        return _down.decode(frame)
    except msgspec.ValidationError as error:
        raise _refused(frame, error) from error
    except UNREADABLE as error:
        raise MalformedFrame(str(error)) from error


def decode_up(frame: bytes) -> Up:
    """Decode a message from a worker. Raises `MalformedFrame`."""
    return decode(_up, frame)


def _refused(frame: bytes, error: msgspec.ValidationError) -> MalformedFrame:
    """Return the error for a frame that holds no valid message."""
    try:
        head = _head.decode(frame)
    except UNREADABLE:
        return MalformedFrame(str(error))
    if head.tag != Generate.__struct_config__.tag:
        return MalformedFrame(str(error))
    what, _, path = str(error).replace("Expected", "expected").partition(" - at `$")
    param = _param([int(index) for index in _INDEX.findall(path)])
    return RefusedRequest(head.rid, f"Invalid value for '{param}': {what.replace('`', '')}.", param)


def _param(path: list[int]) -> str:
    """Return the name of a field by its path in a frame: the index in `Generate`, whose tag has index 0, and that in
    its sampling.
    """
    match path:
        case [at, inner, *_] if Generate.__struct_fields__[at - 1] == "sampling":
            return Sampling.__struct_fields__[inner]
        case [at, *_]:
            return Generate.__struct_fields__[at - 1]
        case _:
            return Generate.__name__
