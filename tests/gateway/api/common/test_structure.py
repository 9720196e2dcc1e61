"""The count of values in a peer's body, which no object is made for."""

from typing import Any

import msgspec
import pytest

from gateway.api.common.structure import MSGPACK_MAX, check_msgpack, count_msgpack
from gateway.errors import BadRequest

PLAIN: list[Any] = [
    0,
    -1,
    -100,
    200,
    -3000,
    70_000,
    1 << 40,
    -(1 << 40),
    1.5,
    None,
    True,
    b"",
    b"x" * 300,
    b"x" * 70_000,
]
TEXTS = ["", "x" * 31, "x" * 32, "x" * 300, "\x80" * 70_000]


def counted(value: Any) -> tuple[int, int]:
    """The same count of the value itself."""
    match value:
        case list():
            inside = [counted(each) for each in value]
        case dict():
            inside = [counted(each) for pair in value.items() for each in pair]
        case _:
            return 0, 1
    return 1 + sum(each[0] for each in inside), 1 + sum(each[1] for each in inside)


@pytest.mark.parametrize(
    "value",
    [
        [],
        {},
        PLAIN,
        TEXTS,
        [[PLAIN, TEXTS], {"a": {"b": TEXTS}}] * 20,
        {str(i): {"c": [i]} for i in range(300)},
        [[[] for _ in range(70_000)]],
        {str(i): i for i in range(70_000)},
    ],
)
def test_every_container_and_value_is_counted(value: Any) -> None:
    assert count_msgpack(msgspec.msgpack.encode(value))[:2] == counted(value)


@pytest.mark.parametrize("inner", [b"\x80", b"\x90", b"\xdc\x00\x00"])
def test_a_body_of_more_containers_than_a_request_has_is_refused(inner: bytes) -> None:
    with pytest.raises(BadRequest):
        check_msgpack(b"\xdd\x00\x10\x00\x00" + inner * (MSGPACK_MAX.containers + 1))


def test_a_body_of_more_values_than_a_request_has_is_refused() -> None:
    with pytest.raises(BadRequest):
        check_msgpack(b"\xdd\x7f\x00\x00\x00" + bytes(MSGPACK_MAX.values + 1))


@pytest.mark.parametrize("body", [b"", b"\xd9", b"\xdd\xff\xff\xff\xff", b"\xc1", b"\xdb\xff\xff\xff\xff"])
def test_what_is_no_msgpack_is_left_to_the_decoder(body: bytes) -> None:
    check_msgpack(body)
