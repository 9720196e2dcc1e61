"""Records of what a lookup in the prefix cache found, and of KV that the cache lost, to explain misses."""

from dataclasses import dataclass
from typing import Final

# Maximum number of evictions that are remembered.
MAX_EVICTIONS: Final = 1024
# End of an eviction that has removed all KV.
EVERYTHING: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class Eviction:
    """Tokens [begin, end) of a path whose KV has left the memory `at` this time of the monotonic clock.

    `owner` is the rid of the request that used them last, 0 if all KV was freed. `by` is the rid of the request that
    needed the memory; 0 if the model's share of memory shrank, and the owner if its KV is larger than the cache.
    """

    at: float
    owner: int
    begin: int
    end: int
    by: int


@dataclass(frozen=True, slots=True)
class CacheLookup:
    """Result of a row's first lookup: `reused` tokens, of which `restored` came from disk, and the `known` tokens that
    are in the tree, with or without KV.

    `problem` is `disk` if a file was not read in time or was unusable, `scored` for a prompt that must be computed
    completely, else empty.
    """

    reused: int = 0
    restored: int = 0
    known: int = 0
    problem: str = ""


SCORED: Final = CacheLookup(problem="scored")
