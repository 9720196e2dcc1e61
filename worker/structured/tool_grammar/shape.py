"""Parts of every tool-call format's grammar."""

from dataclasses import dataclass
from typing import Final

# Calls in one answer, at most, where the grammar alone decides.
MANY: Final = 16
# Where each call has its number, every further one makes the grammar longer.
NUMBERED: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """One answer of calls: `start` first `more` × n `tail`.

    `start` is text; the others are expressions. For an answer that must come to its end, `value_ends` are
    texts that end a value, and `ends` such that end a call or all of them, the most of them first.
    """

    start: str
    first: str
    more: tuple[str, ...] = ()
    tail: str = ""
    value_ends: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
