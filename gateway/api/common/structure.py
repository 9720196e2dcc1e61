"""The structure of a JSON body, counted before anything is made of it: how many values and containers it holds."""

from typing import Final

from gateway.errors import BadRequest

# A container takes hundreds of bytes and the garbage collector's time, a plain value tens of bytes.
CONTAINERS_MAX: Final = 50_000
VALUES_MAX: Final = 1 << 20
# Of objects: each is compared with those that are known.
KEYS_MAX: Final = 250_000
# What is looked at in one go.
WINDOW_BYTES: Final = 256 * 1024


def check_structure(body: bytes) -> None:
    """Raises `BadRequest` for a body of more containers or values than any conversation has."""
    containers, values, keys = count_structure(body)
    if containers > CONTAINERS_MAX:
        raise BadRequest(f"The body holds more than {CONTAINERS_MAX} objects and lists.", code="body_too_complex")
    if values > VALUES_MAX:
        raise BadRequest(f"The body holds more than {VALUES_MAX} values.", code="body_too_complex")
    if keys > KEYS_MAX:
        raise BadRequest(f"The objects of the body hold more than {KEYS_MAX} keys.", code="body_too_complex")


def count_structure(body: bytes, window_bytes: int = WINDOW_BYTES) -> tuple[int, int, int]:
    """The objects and lists of a body, the commas between values, and the keys.

    Exact for what is JSON, up to the first byte that is not: nothing beyond that is decoded either.
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
    return containers, values, keys
