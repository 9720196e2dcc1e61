"""Messages to frames and back. A bad frame is a `MalformedFrame`, a message that makes no frame an `Unsendable`."""

from typing import Final

import msgspec

from protocol.messages import Down, Up

# A larger frame ends its connection for good: libzmq takes it for a fault of the protocol. No side may send one.
MAX_FRAME_BYTES: Final = 64 * 1024 * 1024

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
    try:
        frame = _encoder.encode(message)
    except (OverflowError, RecursionError, UnicodeEncodeError, TypeError) as error:
        raise Unsendable(str(error)) from error
    if len(frame) > MAX_FRAME_BYTES:
        raise FrameTooLarge(len(frame))
    return frame


def decode_down(frame: bytes) -> Down:
    """Decode what the gateway sent. Raises `MalformedFrame`."""
    try:
        return _down.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(str(error)) from error


def decode_up(frame: bytes) -> Up:
    """Decode what a worker sent. Raises `MalformedFrame`."""
    try:
        return _up.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedFrame(str(error)) from error
