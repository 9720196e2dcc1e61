"""The structure of a msgpack body, counted before anything is made of it: how many values and containers it holds."""

from typing import Final

from gateway.errors import BadRequest

# A container takes hundreds of bytes and the garbage collector's time, a plain value tens of bytes. Each of a request's
# sequences has its own copy of the conversation here.
CONTAINERS_MAX: Final = 250_000
VALUES_MAX: Final = 1 << 22
# Of lengths and numbers behind the first byte of a value.
_CONTAINERS: Final = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
_TEXTS: Final = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_NUMBERS: Final = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}


def check_peer_structure(body: bytes) -> None:
    """Raises `BadRequest` for a body of more containers or values than any request of a peer has."""
    containers, values = count_heads(body)
    if containers > CONTAINERS_MAX or values > VALUES_MAX:
        message = f"The body holds more than {CONTAINERS_MAX} maps and lists, or {VALUES_MAX} values."
        raise BadRequest(message, code="body_too_complex")


def count_heads(body: bytes) -> tuple[int, int]:
    """The containers and all values of a body, up to the first beyond the bounds.

    Exact for what is msgpack; no message has an extension, and what follows one counts as it may.
    """
    containers = values = at = 0
    size, heads = len(body), _HEADS
    while at < size and containers <= CONTAINERS_MAX and values <= VALUES_MAX:
        step, width, is_container = heads[body[at]]
        at += step
        values += 1
        if is_container:
            containers += 1
        elif width:
            at += int.from_bytes(body[at - width : at], "big")
    return containers, values


def _head(head: int) -> tuple[int, int, bool]:
    """Of a first byte: bytes to the next value, those of a text's length among them, and whether it is a container."""
    if head in _CONTAINERS:
        return 1 + _CONTAINERS[head], 0, True
    if head in _TEXTS:
        return 1 + _TEXTS[head], _TEXTS[head], False
    if 0xA0 <= head < 0xC0:
        return 1 + head - 0xA0, 0, False
    return 1 + _NUMBERS.get(head, 0), 0, 0x80 <= head < 0xA0


_HEADS: Final = [_head(head) for head in range(256)]
