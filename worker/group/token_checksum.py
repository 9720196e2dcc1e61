"""Tally of all that a group has generated: equal on all ranks, or they are out of step."""

import zlib
from array import array
from collections.abc import Sequence

from worker.engine.row import Token


def tally(crc: int, tokens: Sequence[Token]) -> int:
    """The checksum after these tokens as well."""
    numbers = array("Q", [number for token in tokens for number in (token.row.rid, token.id)])
    return zlib.crc32(numbers.tobytes(), crc)
