"""Messages between mlxd daemons: the requests of a gateway to a peer, and the frames of the answering stream.

A request is one msgpack array, `PeerRequest`. Its answer is a stream of frames, each a length of 4 bytes, big-endian,
and a message: a worker's message with the rids of the requesting gateway, or `PeerAlive`. Fields are only ever
appended, with a default. A gateway sends requests only to peers of its own major and of no older minor, which know all
fields of the requests.
"""

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from protocol.codec import MAX_FRAME_BYTES, MalformedFrame, decode
from protocol.from_worker import Accepted, Progress, Ready, Rejected, Step, Tokenized
from protocol.to_worker import Detokenize, Generate, Tokenize

GENERATE_PATH: Final = "/internal/generate"
STATUS_PATH: Final = "/internal/status"
# Header with the ids of the daemons that a request has passed.
VIA_HEADER: Final = "x-mlxd-via"
_LENGTH_BYTES: Final = 4


class PeerRequest(msgspec.Struct, frozen=True, array_like=True):
    """Sequences to generate with `model`, or a tokenize or detokenize call to it."""

    model: str
    generates: list[Generate] = []
    call: Tokenize | Detokenize | None = None


class PeerAlive(msgspec.Struct, frozen=True, array_like=True, tag=64):
    """Keep-alive of the daemon, sent at least once a second if there is no other message."""


PeerUp = Accepted | Rejected | Progress | Step | Tokenized | PeerAlive


class PeerModel(msgspec.Struct, frozen=True):
    """Model of a daemon. `form` is empty while it is unknown; `ready` is None while the model is not loaded.

    `wait_s` is the estimated time until the prompt of a new request is processed, without a load; `load_s` is the
    estimated time of a load. `prefill_rate` is in tokens per second, 0 while nothing was measured.
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
    # Sampling defaults that this daemon applies to options which a request does not set.
    sampling: dict[str, Any] = {}
    thinking: dict[str, Any] = {}


class PeerStatus(msgspec.Struct, frozen=True):
    """Status of a daemon for its peers; `boot` identifies its gateway's start."""

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
    """Decode a status. Raises `MalformedFrame`."""
    return decode(_statuses, data)


def encode_request(model: str, generates: list[bytes], call: bytes = b"") -> bytes:
    """Encode a request from encoded messages."""
    raw = [msgspec.Raw(frame) for frame in generates]
    return _encoder.encode((model, raw, msgspec.Raw(call) if call else None))


def decode_request(data: bytes) -> PeerRequest:
    """Decode a request. Raises `MalformedFrame`."""
    return decode(_requests, data)


def frame(message: PeerUp) -> bytes:
    """Return a message with its length prefix."""
    body = _encoder.encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "big") + body


class FrameReader:
    """Reader of the frames of one stream, which arrive in arbitrary pieces."""

    def __init__(self, frame_bytes_max: int = MAX_FRAME_BYTES) -> None:
        self._buffer = bytearray()
        self._frame_bytes_max = frame_bytes_max

    def feed(self, data: bytes) -> Iterator[PeerUp]:
        """Yield the messages that are complete. After `MalformedFrame` the stream cannot be read further."""
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
