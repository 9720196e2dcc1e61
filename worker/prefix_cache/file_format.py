"""File of the disk cache: one edge of the prefix tree, as safetensors.

The file has the token ids of the edge, then their KV (the last tokens' KV for windowed layers), then a checkpoint of
the stateful layers at the end; KV or checkpoint may be missing. The metadata has the place of the edge in the tree. A
seal over the header and a checksum of each section detect any change: reading returns what was written, or raises
`Corrupt`.
"""

import hashlib
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Final

import mlx.core as mx
import msgspec
import numpy as np
import numpy.typing as npt
from mlx_lm.models import cache as kinds

from worker.kv.spans_and_checkpoints import Span, has_kv

Tokens = npt.NDArray[np.int32]

FORMAT: Final = 2
SUFFIX: Final = ".safetensors"
_SEAL: Final = b'"seal":"'
_SEAL_DIGITS: Final = 16
_MAX_HEADER: Final = 64 << 20
_BLOCK: Final = 1 << 20
# Number of arrays of a layer that is not quantized: keys and values.
_PLAIN_ARRAYS: Final = 2
# https://github.com/huggingface/safetensors#format
_DTYPES: Final = {
    mx.bool_: "BOOL", mx.uint8: "U8", mx.int8: "I8", mx.uint16: "U16", mx.int16: "I16", mx.uint32: "U32",
    mx.int32: "I32", mx.uint64: "U64", mx.int64: "I64", mx.float16: "F16", mx.bfloat16: "BF16", mx.float32: "F32",
}  # fmt: skip


class Corrupt(Exception):
    """Raised for a file that was changed or was not written by this cache; the message describes the fault."""


class Array(msgspec.Struct, frozen=True, tag="array"):
    """Tensor of the file, by its index."""

    at: int


class Items(msgspec.Struct, frozen=True, tag="items"):
    """List or tuple."""

    is_tuple: bool
    items: "list[Tree]"


class Plain(msgspec.Struct, frozen=True, tag="plain"):
    """Plain value."""

    value: int | float | bool | str | None


Tree = Array | Items | Plain


class Leaf(msgspec.Struct, frozen=True):
    """State of one layer's cache; `kind` is the name of a class in mlx_lm.models.cache."""

    kind: str
    state: Tree


class FileHeader(msgspec.Struct, frozen=True):
    """Header of a file. `parent` is the key of the file with the token before `begin`; empty at the root of the
    tree."""

    format: int
    key: str
    parent: str
    salt: str
    begin: int
    tokens: int
    layers: int
    kv_crc: int
    state_crc: int
    state: list[Leaf] | None
    # Number of arrays of each layer; an empty list means that each layer has keys and values.
    parts: list[int] = []


class _TensorHeader(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Metadata(msgspec.Struct, frozen=True):
    mlxd: str
    seal: str


@dataclass(frozen=True, slots=True)
class EncodedFile:
    """Bytes of a file: the header, then the arrays as they are in memory."""

    header: bytes
    buffers: list[memoryview]
    size: int


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """Checked header of a file, and the offsets of its sections."""

    record: FileHeader
    tokens: Tokens
    kv: tuple[int, int]
    state: tuple[int, int]


def file_key(parent: str, salt: str, begin: int, tokens: Tokens, has_kv: bool) -> str:
    """Return the name of a file. It identifies the whole path, because it includes the parent's name. `salt` is a
    `salt_key`."""
    digest = hashlib.blake2b(f"{FORMAT} {parent} {salt} {begin} {has_kv} ".encode(), digest_size=20)
    digest.update(tokens.astype("<i4").tobytes())
    return digest.hexdigest()


def is_known(leaf: Any) -> bool:
    """Whether a layer's cache can be written. A cache without KV must be one of mlx-lm's classes."""
    return has_kv(leaf) or getattr(kinds, type(leaf).__name__, None) is type(leaf)


def encode(record: FileHeader, tokens: Tokens, span: Span, state: Sequence[Any] | None) -> EncodedFile:
    """Encode a file; missing fields of `record` are computed. All arrays must be evaluated.

    Raises `Corrupt` for a state that cannot be encoded.
    """
    states: list[mx.array] = []
    trees = None if state is None else [Leaf(type(leaf).__name__, _flatten(leaf.state, states)) for leaf in state]
    kv = [array for layer in span for array in layer]
    names = [f"kv.{at}" for at in range(len(kv))] + [f"state.{at}" for at in range(len(states))]
    arrays = kv + states
    views = [memoryview(array) for array in arrays]  # type: ignore[arg-type]  # mlx arrays export buffers
    crcs = [_crc(views[: len(kv)]), _crc(views[len(kv) :])]
    parts = [len(layer) for layer in span] if any(len(layer) != _PLAIN_ARRAYS for layer in span) else []
    record = msgspec.structs.replace(
        record, layers=len(span), kv_crc=crcs[0], state_crc=crcs[1], state=trees, parts=parts
    )
    described = [("tokens", "I32", list(tokens.shape))] if len(tokens) else []
    described += [(name, _DTYPES[array.dtype], list(array.shape)) for name, array in zip(names, arrays, strict=True)]
    ids = memoryview(tokens.astype("<i4").tobytes())
    buffers = [ids, *views] if len(tokens) else views
    table: dict[str, _Metadata | _TensorHeader] = {
        "__metadata__": _Metadata(msgspec.json.encode(record).decode(), "0" * _SEAL_DIGITS)
    }
    end = 0
    for (name, dtype, shape), buffer in zip(described, buffers, strict=True):
        table[name] = _TensorHeader(dtype, shape, (end, end + buffer.nbytes))
        end += buffer.nbytes
    header = msgspec.json.encode(table)
    header += b" " * (-len(header) % 8)
    header = header.replace(_SEAL + b"0" * _SEAL_DIGITS, _SEAL + _seal(header), 1)
    return EncodedFile(struct.pack("<Q", len(header)) + header, buffers, 8 + len(header) + end)


def open_file(file: BinaryIO) -> OpenedFile:
    """Check a file's header and token ids, which is cheap. Raises `Corrupt`."""
    size = os.fstat(file.fileno()).st_size
    start = file.read(8)
    length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
    if not 0 < length <= min(_MAX_HEADER, size - 8):
        raise Corrupt("it is truncated, or not a safetensors file")
    header = file.read(length)
    at = header.find(_SEAL) + len(_SEAL)
    seal, blank = header[at : at + _SEAL_DIGITS], b"0" * _SEAL_DIGITS
    if at < len(_SEAL) or _seal(header[:at] + blank + header[at + _SEAL_DIGITS :]) != seal:
        raise Corrupt("its header has been changed, or is not ours")
    try:
        table = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        metadata = msgspec.json.decode(table.pop("__metadata__"), type=_Metadata)
        tensors = {name: msgspec.json.decode(raw, type=_TensorHeader).data_offsets for name, raw in table.items()}
        record = msgspec.json.decode(metadata.mlxd, type=FileHeader)
    except (msgspec.MsgspecError, KeyError) as error:
        raise Corrupt(f"its header cannot be read: {error}") from error
    body = 8 + length
    if body + max((end for _, end in tensors.values()), default=0) != size:
        raise Corrupt(f"it has {size} bytes, not what its header says")
    tokens = np.frombuffer(file.read(4 * record.tokens), dtype="<i4").astype(np.int32)
    if file_key(record.parent, record.salt, record.begin, tokens, record.layers > 0) != record.key:
        raise Corrupt("its tokens do not go with its name")
    edge = body + 4 * record.tokens
    middle = body + max((end for name, (_, end) in tensors.items() if not name.startswith("state.")), default=0)
    return OpenedFile(record, tokens, (edge, middle), (middle, size))


def load(path: Path, key: str, *, with_state: bool) -> tuple[Span, list[Any] | None]:
    """Read the KV and, with `with_state`, the checkpoint of a file, checked and evaluated. Raises `Corrupt` or
    `OSError`."""
    with path.open("rb") as file:
        opened = open_file(file)
        record = opened.record
        if record.key != key or record.format != FORMAT:
            raise Corrupt("it is another file's content")
        _verify(file, opened.kv, record.kv_crc)
        if with_state:
            _verify(file, opened.state, record.state_crc)
    arrays: Any = mx.load(str(path), format="safetensors")
    parts = record.parts or [_PLAIN_ARRAYS] * record.layers
    kv = iter([arrays[f"kv.{at}"] for at in range(sum(parts))])
    span: Span = [tuple(islice(kv, size)) for size in parts]
    state = None
    if with_state and record.state is not None:
        state = [getattr(kinds, leaf.kind).from_state(_unflatten(leaf.state, arrays)) for leaf in record.state]
    needed = [array for name, array in arrays.items() if name.startswith("kv.") or (with_state and name != "tokens")]
    mx.eval(needed)
    return span, state


def _flatten(value: Any, arrays: list[mx.array]) -> Tree:
    if isinstance(value, mx.array):
        arrays.append(value)
        return Array(len(arrays) - 1)
    if isinstance(value, list | tuple):
        return Items(isinstance(value, tuple), [_flatten(item, arrays) for item in value])
    if value is None or isinstance(value, bool | int | float | str):
        return Plain(value)
    raise Corrupt(f"a state holds a {type(value).__name__}")


def _unflatten(tree: Tree, arrays: dict[str, mx.array]) -> Any:
    match tree:
        case Array(at=at):
            return arrays[f"state.{at}"]
        case Items(is_tuple=is_tuple, items=items):
            values = [_unflatten(item, arrays) for item in items]
            return tuple(values) if is_tuple else values
        case Plain(value=value):
            return value


def _crc(buffers: Iterable[memoryview]) -> int:
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(buffer, crc)
    return crc


def _verify(file: BinaryIO, section: tuple[int, int], expected: int) -> None:
    begin, end = section
    file.seek(begin)
    block, crc, left = memoryview(bytearray(_BLOCK)), 0, end - begin
    while left:
        count = file.readinto(block[: min(left, _BLOCK)])  # type: ignore[attr-defined]  # opened unbuffered or not
        if not count:
            raise Corrupt("it is truncated")
        crc, left = zlib.crc32(block[:count], crc), left - count
    if crc != expected:
        raise Corrupt("its content has been changed")


def _seal(header: bytes) -> bytes:
    """Return the seal of a header in which the seal's place is blank."""
    return hashlib.blake2b(header, digest_size=_SEAL_DIGITS // 2).hexdigest().encode()
