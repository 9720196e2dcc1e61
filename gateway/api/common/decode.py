"""Decoding of bodies to structs for all dialects. Errors become a `BadRequest`, and unknown fields are reported.

A call of the decoder holds the interpreter's lock, which halts all streams. A large body is therefore decoded in
pieces, after its structure was checked against limits.

Structure of a body: the numbers of its containers, values and keys. They are counted before the body is decoded.
"""

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from gateway.api.common.request_fields import FieldTable, refuse
from gateway.errors import BadRequest, missing_parameter


class Structure(NamedTuple):
    """Numbers of containers (objects and lists), of values, and of keys in a body; or limits of these numbers."""

    containers: int
    values: int
    keys: int = 0


# These limits bound memory and time: a container takes hundreds of bytes and the garbage collector's time, a plain
# value takes tens of bytes, and each key of an object is compared with the known keys.
JSON_MAX: Final = Structure(50_000, 1 << 20, 250_000)
WINDOW_BYTES: Final = 256 * 1024


def check_json(body: bytes) -> None:
    """Raises `BadRequest` if a body has more containers, values or keys than any conversation."""
    _check(count_json(body), JSON_MAX)


def _check(counted: Structure, most: Structure) -> None:
    if counted.containers > most.containers:
        raise BadRequest(f"The body holds more than {most.containers} objects and lists.", code="body_too_complex")
    if counted.values > most.values:
        raise BadRequest(f"The body holds more than {most.values} values.", code="body_too_complex")
    if counted.keys > most.keys:
        raise BadRequest(f"The objects of the body hold more than {most.keys} keys.", code="body_too_complex")


def count_json(body: bytes, window_bytes: int = WINDOW_BYTES) -> Structure:
    """Count the objects and lists of a body, the commas between values, and the keys.

    The counts are exact up to the first byte that is no JSON, where the decoder stops too.
    """
    containers = values = keys = 0
    is_in_string = is_escaped = False
    for start in range(0, len(body), window_bytes):
        window = body[start : start + window_bytes]
        if is_escaped:
            window = b"_" + window[1:]
        is_escaped = (len(window) - len(window.rstrip(b"\\"))) % 2 == 1
        parts = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_in_string::2])
        is_in_string ^= len(parts) % 2 == 0
        containers += outside.count(b"{") + outside.count(b"[")
        values += outside.count(b",")
        keys += outside.count(b":")
    return Structure(containers, values, keys)


T = TypeVar("T", bound=Struct)

# A body up to this size is decoded in one call; a larger one is decoded in pieces of about this size.
PIECE_BYTES: Final = 128 * 1024
# Maximum size of the unknown fields of one object. It limits the time for checking their names.
UNKNOWN_BYTES_MAX: Final = 256 * 1024
_BIAS: Final = "logit_bias"
BIAS_BYTES_MAX: Final = 512 * 1024

_keys = msgspec.json.Decoder(dict[str, Raw])
_raws = msgspec.json.Decoder(list[Raw])
_message_keys = msgspec.json.Decoder(list[dict[str, Raw]])
_raw = msgspec.json.Decoder(Raw)
# A body must be decodable inside this many additional lists, because its values are encoded later with more calls on
# the stack.
_SPARE_DEPTH: Final = 50
# A body with fewer brackets is not checked, because it cannot reach Python's limit of 1000 levels.
_BRACKETS_MIN: Final = 500
_MISSING: Final = "missing required field `"
_ITEM_PATH: Final = re.compile(r" - at `\$\[(\d+)\]")


class Schema(Generic[T]):
    """Decoder of one endpoint's bodies.

    `no_action` names fields that are accepted without effect. `listed` names the field with the conversation, which may
    be a list of `item`s. If `item_fields` is given, all other fields of an item are reported as unknown. A field in
    `refused` raises `BadRequest` if its value would have an effect.
    """

    def __init__(
        self,
        struct: type[T],
        no_action: AbstractSet[str] = frozenset(),
        listed: str = "",
        item: type[Struct] | None = None,
        item_fields: AbstractSet[str] | None = None,
        refused: FieldTable | None = None,
    ) -> None:
        self._decoder = msgspec.json.Decoder(struct)
        self._known = frozenset(struct.__struct_fields__) | no_action
        self._parts = _parts(self._known)
        self._listed = listed
        self._items: msgspec.json.Decoder[list[Any]] = msgspec.json.Decoder(list[item or Raw])
        self._item_fields = item_fields
        self._item_parts = None if item_fields is None else _parts(item_fields)
        self._refused: FieldTable = refused or {}

    def decode(self, body: bytes) -> tuple[T, list[str]]:
        """Return the request and the names of its unknown fields. Raises `BadRequest`."""
        try:
            # msgspec skips fields that the struct lacks without checking their text.
            body.decode("utf-8")
            if len(body) > PIECE_BYTES:
                return self._in_pieces(body)
            request = self._decoder.decode(body)
            _check_depth(body)
            return request, self._unknown(body)
        except UnicodeDecodeError as error:
            raise BadRequest(f"The body is not valid UTF-8 (byte {error.start}).") from None
        except RecursionError:
            raise BadRequest("The body is nested too deeply.") from None
        except msgspec.ValidationError as error:
            raise _validation(str(error)) from None
        except msgspec.DecodeError as error:
            raise BadRequest(f"The body is not valid JSON: {error}." if body else "The request has no body.") from None

    def _unknown(self, body: bytes) -> list[str]:
        fields = _keys.decode(body)
        unknown = self._ignored(fields)
        if self._item_fields is not None and self._listed in fields:
            seen = {key for item in _message_keys.decode(fields[self._listed]) for key in item}
            unknown += [f"{self._listed}.{key}" for key in sorted(seen - self._item_fields)]
        return unknown

    def _ignored(self, fields: Mapping[str, bytes | Raw]) -> list[str]:
        """Return the names of unknown fields, which have no effect. Raises `BadRequest` for refused fields."""
        unknown = [key for key in fields if key not in self._known]
        refuse({key: msgspec.json.decode(fields[key]) for key in unknown if key in self._refused}, self._refused)
        return [key for key in unknown if key not in self._refused]

    def _in_pieces(self, body: bytes) -> tuple[T, list[str]]:
        check_json(body)
        _check_depth(body)
        fields = _fields(self._parts, body, "The body")
        if len(fields.get(_BIAS, b"")) > BIAS_BYTES_MAX:
            raise BadRequest(f"'{_BIAS}' is larger than {BIAS_BYTES_MAX} bytes.", _BIAS, "invalid_value")
        unknown = self._ignored(fields)
        listed = fields.get(self._listed, b"")
        if len(listed) <= PIECE_BYTES or not listed.startswith(b"["):
            return self._decoder.decode(body), unknown
        raws = _raws.decode(listed)
        items: list[Any] = []
        seen: set[str] = set()
        for piece in _pieces(raws):
            items += self._decode_items(piece, len(items))
            seen |= self._names(piece)
        if self._item_fields is not None:
            unknown += [f"{self._listed}.{key}" for key in sorted(seen - self._item_fields)]
        # All items are decoded already, so the list in the rest of the body is shortened to its first item.
        rest = _object(fields | {self._listed: b"[" + bytes(raws[0]) + b"]"})
        request = self._decoder.decode(rest)
        return msgspec.structs.replace(request, **{self._listed: items}), unknown

    def _decode_items(self, piece: bytes, first: int) -> list[Any]:
        try:
            return self._items.decode(piece)
        except msgspec.ValidationError as error:
            # Replace the item's index in this piece by its index in the whole list.
            path = _ITEM_PATH.sub(
                lambda match: f" - at `$.{self._listed}[{first + int(match[1])}]", str(error), count=1
            )
            raise msgspec.ValidationError(path) from None

    def _names(self, piece: bytes) -> set[str]:
        """Return the names of the fields that the items have."""
        if self._item_parts is None:
            return set()
        if len(piece) > UNKNOWN_BYTES_MAX:
            # Only a single item makes a piece this large.
            return set(_fields(self._item_parts, piece[1:-1], f"One of '{self._listed}'"))
        return {key for item in _message_keys.decode(piece) for key in item}


def converted(raw: dict[str, Any], struct: type[T], where: str, *, strict: bool = True) -> T:
    """Convert a part of a body to a type. Unless `strict`, texts are also converted to numbers. Raises `BadRequest`."""
    try:
        return msgspec.convert(raw, struct, strict=strict)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = (where + path.rstrip("`")).lstrip(".")
        raise BadRequest(f"Invalid value for '{param}': {what.replace('`', '')}.", param, "invalid_value") from None


def _parts(known: AbstractSet[str]) -> msgspec.json.Decoder[Any]:
    """Return a decoder that finds the text of each known field of an object and skips all other fields."""
    ordered = sorted(known)
    fields = [(f"f{at}", Raw, msgspec.field(name=name, default=Raw())) for at, name in enumerate(ordered)]
    return msgspec.json.Decoder(msgspec.defstruct("Parts", fields, frozen=True, gc=False))


def _fields(parts: msgspec.json.Decoder[Any], text: bytes, what: str) -> dict[str, bytes]:
    """Return the text of each field of an object. Raises `BadRequest` if unknown fields take too many bytes."""
    known = parts.decode(text)
    known_bytes = sum(len(bytes(getattr(known, name))) for name in known.__struct_fields__)
    if len(text) - known_bytes > UNKNOWN_BYTES_MAX:
        raise BadRequest(f"{what} has more than {UNKNOWN_BYTES_MAX} bytes of unknown fields.")
    return {name: bytes(value) for name, value in _keys.decode(text).items()}


def _pieces(raws: list[Raw]) -> Iterator[bytes]:
    """Yield lists of items of at most about `PIECE_BYTES`. A larger item is the only one in its list."""
    piece: list[bytes] = []
    size = 0
    for raw in raws:
        item = bytes(raw)
        if piece and size + len(item) > PIECE_BYTES:
            yield b"[" + b",".join(piece) + b"]"
            piece, size = [], 0
        piece.append(item)
        size += len(item)
    yield b"[" + b",".join(piece) + b"]"


def _object(fields: dict[str, bytes]) -> bytes:
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + value for name, value in fields.items()) + b"}"


def _check_depth(body: bytes) -> None:
    """Raises `RecursionError` if the body is nested too deeply."""
    if body.count(b"{") + body.count(b"[") > _BRACKETS_MIN:
        _raw.decode(b"[" * _SPARE_DEPTH + body + b"]" * _SPARE_DEPTH)


def _validation(text: str) -> BadRequest:
    """Return msgspec's error in OpenAI's form: the parameter, and what was expected there."""
    what, _, path = text.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    if _MISSING in what:
        field = what.partition(_MISSING)[2].rstrip("`")
        param = f"{path}.{field}" if path else field
        return missing_parameter(param)
    what = what.replace("`", "").replace("Expected", "expected").replace("Number", "number")
    if not path:
        return BadRequest(f"Invalid body: {what}.")
    return BadRequest(f"Invalid value for '{path}': {what}.", path, "invalid_value")
