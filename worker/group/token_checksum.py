"""Checksum of all tokens that a group has generated; if the checksum differs between ranks, the ranks are out of
step."""

import zlib
from array import array
from collections.abc import Sequence

from worker.engine.row import Token


def extend_checksum(crc: int, tokens: Sequence[Token]) -> int:
    """Return the checksum updated with these tokens."""
    numbers = array("Q", [number for token in tokens for number in (token.row.rid, token.id)])
    return zlib.crc32(numbers.tobytes(), crc)
