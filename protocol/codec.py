"""Messages to frames and back. Every malformed frame is a `MalformedFrame`, never another exception."""

from typing import Final

import msgspec

from protocol.messages import Down, Up

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024

_encoder = msgspec.msgpack.Encoder()
_down: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_up: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


class MalformedFrame(ValueError):
    """A frame that is not a message of this protocol."""


def encode(message: Down | Up) -> bytes:
    return _encoder.encode(message)


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
