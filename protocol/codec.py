"""Messages to frames and back. A bad frame is a `MalformedFrame`, a message that makes no frame an `Unsendable`."""

from collections.abc import Sequence
from typing import Final, TypeVar, cast

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from protocol.messages import Down, Generate, Prompt, Up

T = TypeVar("T")

# A larger frame ends its connection for good: libzmq takes it for a fault of the protocol. No side may send one.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
# For estimates of a prompt's tokens by its size: about what English and code have.
BYTES_PER_TOKEN: Final = 4

# Errors of msgspec for bytes that are no message: not its form, not UTF-8, or too deep.
UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_encoder = msgspec.msgpack.Encoder()
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


class MalformedFrame(ValueError):
    """A frame that is not a message of this protocol."""


class Unsendable(ValueError):
    """A message that makes no frame: a number beyond 64 bits, half a character, values nested too deeply."""


class FrameTooLarge(Unsendable):
    """A message whose frame is larger than `MAX_FRAME_BYTES`."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(f"a frame of {size_bytes} bytes; at most {MAX_FRAME_BYTES} can be sent")
        self.size_bytes = size_bytes


def encode(message: Down | Up) -> bytes:
    """The frame of a message. Raises `Unsendable`, of which `FrameTooLarge` is one."""
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
    """The same requests with their prompts encoded: once for all that share one, and before they are to be sent.

    Raises `Unsendable`.
    """
    packed: dict[int, Raw] = {}
    for request in requests:
        if id(request.prompt) not in packed:
            packed[id(request.prompt)] = Raw(_encode(request.prompt))
    # The encoder puts it where the prompt stands; no other code looks into the prompt of a request to be sent.
    return [replace(request, prompt=cast(Prompt, packed[id(request.prompt)])) for request in requests]


def prompt_bytes(request: Generate) -> int:
    """The size of a request's prompt in its frame."""
    prompt = cast(Prompt | Raw, request.prompt)
    return len(memoryview(prompt)) if isinstance(prompt, Raw) else len(_encode(prompt))


def decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes) -> T:
    """Raises `MalformedFrame`."""
    try:
        return decoder.decode(frame)
    except UNREADABLE as error:
        raise MalformedFrame(str(error)) from error


def decode_down(frame: bytes) -> Down:
    """Decode what the gateway sent. Raises `MalformedFrame`."""
    return decode(_down, frame)


def decode_up(frame: bytes) -> Up:
    """Decode what a worker sent. Raises `MalformedFrame`."""
    return decode(_up, frame)
