"""Parts of every tool-call format's grammar."""

from dataclasses import dataclass
from typing import Final

# Maximum number of calls in one answer, if the grammar is the only limit.
MANY: Final = 16
# Maximum number of calls where each contains its index, because each one makes the grammar longer.
NUMBERED: Final = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Grammar of one answer of calls: `start` first `more` × n `tail`.

    `start` is text; the others are expressions. Early finish uses `value_ends`, texts that end a value, and `ends`,
    texts that end a call or all calls, ordered from the longest to the shortest reach.
    """

    start: str
    first: str
    more: tuple[str, ...] = ()
    tail: str = ""
    value_ends: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
