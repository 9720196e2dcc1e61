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
