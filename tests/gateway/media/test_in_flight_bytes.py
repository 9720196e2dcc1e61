"""Bytes of media in flight: the limit of all, and the share of one key."""

import pytest

from gateway.errors import Unavailable
from gateway.media.read_media import InFlightBytes, MediaLease, quota_bytes
from protocol.codec import MAX_FRAME_BYTES

MIB = 1 << 20


def lease(counted: InFlightBytes, owner: str) -> MediaLease:
    made = counted.lease()
    made.owner = owner
    return made


@pytest.mark.parametrize(
    ("limit", "has_others", "quota"),
    [
        (512 * MIB, True, 256 * MIB),
        (512 * MIB, False, 512 * MIB),
        # What one request can send at most is never too much.
        (100 * MIB, True, MAX_FRAME_BYTES),
        (40 * MIB, True, 40 * MIB),
    ],
)
def test_a_key_has_half_while_there_are_others(limit: int, has_others: bool, quota: int) -> None:
    assert quota_bytes(limit, has_others) == quota


def test_the_media_of_one_key_leave_room_for_those_of_another() -> None:
    counted = InFlightBytes(lambda: True, 512 * MIB)
    flooding = [lease(counted, "a") for _ in range(5)]
    for each in flooding[:4]:
        each.grow(64 * MIB)
    with pytest.raises(Unavailable, match="this key's requests fill its share") as refusal:
        flooding[4].grow(1)
    assert refusal.value.code == "media_memory_full"

    other = lease(counted, "b")
    other.grow(256 * MIB)
    with pytest.raises(Unavailable, match="requests that run fill the memory"):
        lease(counted, "c").grow(1)
    assert (counted.numbers.used_bytes, counted.numbers.refused) == (512 * MIB, 2)

    flooding[0].close()
    flooding[4].grow(64 * MIB)
    for each in (*flooding, other):
        each.close()
    assert counted.numbers.used_bytes == 0


def test_a_key_alone_may_fill_all_of_it() -> None:
    counted = InFlightBytes(lambda: False, 512 * MIB)
    lease(counted, "").grow(512 * MIB)
