"""Records of a journal: the request, then each piece of the output. Their framing reveals a damaged end of the file."""

import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Struct

from gateway.api.responses import response as out
from gateway.api.responses.request import InputItem
from gateway.api.responses.tools import ToolIdentity
from protocol.codec import UNREADABLE
from protocol.from_worker import Delta
from protocol.to_worker import Generate

# First line of a file. Each format has its own, so that no version reads a format that it does not know.
MAGIC: Final = b"mlxd-journal 1\n"
# Each record is preceded by its length and its CRC-32.
_HEAD: Final = struct.Struct("<II")


class JournaledRequest(Struct, frozen=True, omit_defaults=True):
    """First record of a journal: a background response before its first token, with all that its generation needs.

    `key` is the name of the caller's key, and `owner` owns what that key stores; `path` is the path of the model's
    weights. `began` is wall-clock time; `limit_s` 0 means no limit. `inputs` are the response's input items as they are
    stored. `is_everybodys` is set if the caller was anonymous.
    """

    key: str | None
    model: str
    path: str
    request_id: str
    response: out.Response
    generate: Generate
    inputs: list[InputItem]
    forms: Mapping[str, ToolIdentity]
    is_sealed: bool
    body_bytes: int
    began: float
    limit_s: float = 0.0
    is_everybodys: bool = False
    owner: str = ""

    @property
    def tenant(self) -> str:
        """Owner of the response. A journal of an earlier version has only the name of the key."""
        return self.owner or self.key or ""


class BeginRecord(Struct, frozen=True, array_like=True, tag=1):
    """Record with which each daemon begins its part. `boot` is the id of the machine's boot; empty if unknown."""

    boot: str


class StartRecord(Struct, frozen=True, array_like=True, tag=2):
    """Record that the request was given to a worker."""


class DeltaRecord(Struct, frozen=True, array_like=True, tag=3):
    """Deltas that were encoded together. Encoding them together again gives their events the same numbers.

    `left_out` has the numbers of turns and of tokens that were left out of the prompt.
    """

    deltas: list[Delta]
    left_out: tuple[int, int] = (0, 0)


class ShutdownRecord(Struct, frozen=True, array_like=True, tag=4):
    """Record of an orderly shutdown of the daemon: all earlier records are on the disk."""


Record = BeginRecord | StartRecord | DeltaRecord | ShutdownRecord


@dataclass(frozen=True, slots=True)
class ContentRecord:
    """Content of a journal. `whole_bytes` is the position after the last complete record."""

    request: JournaledRequest
    records: list[Record]
    whole_bytes: int


# The first record of a journal of which a power cut has left the request alone.
LOST_BEGIN: Final = BeginRecord("")


class NotUnderstood(Exception):
    """Raised if the file is no journal, or a journal of another version."""


_encode = msgspec.msgpack.Encoder().encode
_request: msgspec.msgpack.Decoder[JournaledRequest] = msgspec.msgpack.Decoder(JournaledRequest)
_record: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def framed(record: Record | JournaledRequest) -> bytes:
    """Encode a record with its frame."""
    payload = _encode(record)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def parsed(data: bytes) -> ContentRecord:
    """Return the content of a file up to the first record that is cut off or damaged. Raises `NotUnderstood`."""
    if not data.startswith(MAGIC):
        raise NotUnderstood("its first line is another")
    first, place = _payload(data, len(MAGIC))
    try:
        request = _request.decode(first)
        records: list[Record] = []
        whole_bytes = place
        while True:
            payload, place = _payload(data, place)
            if not payload:
                return ContentRecord(request, records, whole_bytes)
            records.append(_record.decode(payload))
            whole_bytes = place
    except UNREADABLE as error:
        raise NotUnderstood(str(error)) from None


def _payload(data: bytes, place: int) -> tuple[memoryview, int]:
    """Return the payload of the record that begins at `place`, empty if there is none, and the position of its end."""
    begin = place + _HEAD.size
    if begin > len(data):
        return memoryview(b""), place
    size, checksum = _HEAD.unpack_from(data, place)
    payload = memoryview(data)[begin : begin + size]
    if len(payload) < size or zlib.crc32(payload) != checksum:
        return memoryview(b""), place
    return payload, begin + size
