"""Records of a journal: what was asked, and each piece of the output, framed so that a cut or damaged end is seen."""

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

# Another form of the file has another first line: no version reads one that it does not know.
MAGIC: Final = b"mlxd-journal 1\n"
# Length and CRC-32 of a record.
_HEAD: Final = struct.Struct("<II")


class JournaledRequest(Struct, frozen=True, omit_defaults=True):
    """A background response before its first token, with all that its generation needs: the first record.

    `key` is the name of the key that asked; `path` is of the model's weights. `began` is wall-clock time, `limit_s` of
    0 no limit. `inputs` are its input items as they are kept. `is_everybodys` of an anonymous caller.
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


class BeginRecord(Struct, frozen=True, array_like=True, tag=1):
    """A daemon writes from here on. `boot` is the boot of the machine; empty where it is not known."""

    boot: str


class StartRecord(Struct, frozen=True, array_like=True, tag=2):
    """A worker has it."""


class DeltaRecord(Struct, frozen=True, array_like=True, tag=3):
    """Deltas that were encoded together: so are they again, and their events get the same numbers."""

    deltas: list[Delta]
    # Turns and tokens of the prompt that were left out of it.
    left_out: tuple[int, int] = (0, 0)


class ShutdownRecord(Struct, frozen=True, array_like=True, tag=4):
    """The daemon ended in order: everything before is on the disk."""


class PlacementRecord(Struct, frozen=True, array_like=True, tag=5):
    """Form of the model that generates the deltas from here on, at a peer perhaps."""

    form: str


Record = BeginRecord | StartRecord | DeltaRecord | ShutdownRecord | PlacementRecord


@dataclass(frozen=True, slots=True)
class ContentRecord:
    """A journal as it was read; `whole_bytes` is where its last whole record ends."""

    asked: JournaledRequest
    records: list[Record]
    whole_bytes: int


class NotUnderstood(Exception):
    """A file that is no journal, or that of another version."""


_encode = msgspec.msgpack.Encoder().encode
_asked: msgspec.msgpack.Decoder[JournaledRequest] = msgspec.msgpack.Decoder(JournaledRequest)
_record: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def framed(record: Record | JournaledRequest) -> bytes:
    """A record as it stands in the file."""
    payload = _encode(record)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def parsed(data: bytes) -> ContentRecord:
    """Content of a file, up to the first record that is cut off or damaged. Raises `NotUnderstood`."""
    if not data.startswith(MAGIC):
        raise NotUnderstood("its first line is another")
    first, place = _payload(data, len(MAGIC))
    try:
        asked = _asked.decode(first)
        records: list[Record] = []
        whole_bytes = place
        while True:
            payload, place = _payload(data, place)
            if not payload:
                return ContentRecord(asked, records, whole_bytes)
            records.append(_record.decode(payload))
            whole_bytes = place
    except UNREADABLE as error:
        raise NotUnderstood(str(error)) from None


def _payload(data: bytes, place: int) -> tuple[memoryview, int]:
    """The record that begins at `place`, empty where there is none, and the end of it."""
    begin = place + _HEAD.size
    if begin > len(data):
        return memoryview(b""), place
    size, checksum = _HEAD.unpack_from(data, place)
    payload = memoryview(data)[begin : begin + size]
    if len(payload) < size or zlib.crc32(payload) != checksum:
        return memoryview(b""), place
    return payload, begin + size
