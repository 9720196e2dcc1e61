"""Structure of a body: the numbers of its containers, values and keys. They are counted before the body is decoded."""

from typing import Final, NamedTuple

from gateway.errors import BadRequest


class Structure(NamedTuple):
    """Numbers of containers (objects and lists), of values, and of keys in a body; or limits of these numbers."""

    containers: int
    values: int
    keys: int = 0


# These limits bound memory and time: a container takes hundreds of bytes and the garbage collector's time, a plain
# value takes tens of bytes, and each key of an object is compared with the known keys.
JSON_MAX: Final = Structure(50_000, 1 << 20, 250_000)
# These limits are larger, because a peer's request contains the conversation once per sequence. Keys count as values.
MSGPACK_MAX: Final = Structure(250_000, 1 << 22)
WINDOW_BYTES: Final = 256 * 1024
# Each table maps the first byte of a msgpack value to the size in bytes of the field that follows it. The field
# contains the length of the container or text, or the number itself.
_CONTAINERS: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_TEXTS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_NUMBERS: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def check_json(body: bytes) -> None:
    """Raises `BadRequest` if a body has more containers, values or keys than any conversation."""
    _check(count_json(body), JSON_MAX)


def check_msgpack(body: bytes) -> None:
    """Raises `BadRequest` if a body has more containers or values than any request of a peer."""
    _check(count_msgpack(body), MSGPACK_MAX)


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


def count_msgpack(body: bytes) -> Structure:
    """Count the containers and all values of a body, until a limit is exceeded.

    The counts are exact for msgpack without extension types, which no message contains.
    """
    containers = values = at = 0
    size, heads = len(body), _HEADS
    containers_max, values_max, _ = MSGPACK_MAX
    while at < size and containers <= containers_max and values <= values_max:
        step, width, is_container = heads[body[at]]
        at += step
        values += 1
        if is_container:
            containers += 1
        elif width:
            at += int.from_bytes(body[at - width : at], "big")
    return Structure(containers, values)


def _head(head: int) -> tuple[int, int, bool]:
    """Decode the first byte of a value. Returns the number of bytes to the next value (without those of a text), the
    size of a text's length field, and whether the value is a container.
    """
    if head in _CONTAINERS:
        return 1 + _CONTAINERS[head], 0, True
    if head in _TEXTS:
        return 1 + _TEXTS[head], _TEXTS[head], False
    if 0xA0 <= head < 0xC0:
        return 1 + head - 0xA0, 0, False
    return 1 + _NUMBERS.get(head, 0), 0, 0x80 <= head < 0xA0


_HEADS: Final = [_head(head) for head in range(256)]
