"""Messages between mlxd daemons: what a gateway asks of a peer, and the frames of the stream that answers it.

A request is one msgpack array, `PeerRequest`; its answer is a stream of frames, each a length of 4 bytes, big-endian,
and a message: those that a worker sends, with the rids of the gateway that asks, and `PeerAlive`. Fields are only ever
appended, with a default. A gateway asks only peers of its own major and of no older minor than its own: what it asks
for is understood there.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from protocol.codec import MAX_FRAME_BYTES, MalformedFrame, decode
from protocol.messages import (
    Accepted,
    Detokenize,
    Generate,
    Progress,
    Ready,
    Rejected,
    Step,
    Tokenize,
    Tokenized,
)

GENERATE_PATH: Final = "/internal/generate"
STATUS_PATH: Final = "/internal/status"
# Ids of the daemons that a request has passed.
VIA_HEADER: Final = "x-mlxd-via"
_LENGTH_BYTES: Final = 4


class PeerRequest(msgspec.Struct, frozen=True, array_like=True):
    """Sequences to generate with `model`, or a question about tokens to it."""

    model: str
    generates: list[Generate] = []
    question: Tokenize | Detokenize | None = None


class PeerAlive(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """Nothing new: the daemon lives. It says this at least once a second where it has nothing else to say."""


PeerUp = Accepted | Rejected | Progress | Step | Tokenized | PeerAlive


class PeerModel(msgspec.Struct, frozen=True):
    """One model of a daemon. `form` is empty while it is not known; `ready` is None while it is not loaded.

    `wait_s` is about how long a new request waits before its prompt is processed, a load not included; `load_s` is
    about how long a load takes. `prefill_rate` is in tokens a second, 0 while nothing was measured.
    """

    name: str
    aliases: tuple[str, ...] = ()
    form: str = ""
    state: str = ""
    ready: Ready | None = None
    context: int = 0
    inside: int = 0
    slots: int = 1
    bound: int = 1
    wait_s: float = 0.0
    load_s: float = 0.0
    prefill_rate: float = 0.0
    backlog_tokens: int = 0
    # Of requests that do not say, as the daemon would fill them in.
    sampling: dict[str, Any] = {}
    thinking: dict[str, Any] = {}


class PeerStatus(msgspec.Struct, frozen=True):
    """A daemon as its peers see it; `boot` is of its gateway's start."""

    node: str
    boot: int
    version: str
    major: int
    minor: int
    is_draining: bool = False
    models: list[PeerModel] = []


_encoder: Final = msgspec.msgpack.Encoder()
_requests: Final = msgspec.msgpack.Decoder(PeerRequest)
_statuses: Final = msgspec.msgpack.Decoder(PeerStatus)
_frames: Final[msgspec.msgpack.Decoder[PeerUp]] = msgspec.msgpack.Decoder(PeerUp)


def encode_status(status: PeerStatus) -> bytes:
    return _encoder.encode(status)


def decode_status(data: bytes) -> PeerStatus:
    """Raises `MalformedFrame`."""
    return decode(_statuses, data)


def encode_request(model: str, generates: list[bytes], question: bytes = b"") -> bytes:
    """A request of messages that are encoded already."""
    raw = [msgspec.Raw(frame) for frame in generates]
    return _encoder.encode((model, raw, msgspec.Raw(question) if question else None))


def decode_request(data: bytes) -> PeerRequest:
    """Raises `MalformedFrame`."""
    return decode(_requests, data)


def frame(message: PeerUp) -> bytes:
    """A message with its length before it."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReader:
    """The frames of one stream, whatever pieces it comes in."""

    def __init__(self, frame_bytes_max: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._frame_bytes_max = frame_bytes_max

    def feed(self, data: bytes) -> Iterator[PeerUp]:
        """The messages that are complete now. Raises `MalformedFrame`, after which nothing can be read any more."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _LENGTH_BYTES:
                begin = at + _LENGTH_BYTES
                length = int.from_bytes(buffer[at:begin], "big")
                if length > self._frame_bytes_max:
                    raise MalformedFrame(f"a frame of {length} bytes")
                if len(buffer) - begin < length:
                    break
                at = begin + length
                yield decode(_frames, bytes(buffer[begin:at]))
        finally:
            del buffer[:at]
