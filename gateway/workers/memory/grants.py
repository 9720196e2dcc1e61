"""Records of the broker: a model's claim to memory, its tenancy, and memory that it has just given back."""

import asyncio
from dataclasses import dataclass

from gateway.workers.memory.estimate import Need
from gateway.workers.memory.policy import LoadClaim
from gateway.workers.memory.pressure import Pressure


@dataclass(slots=True)
class PendingGrant:
    """A worker that waits to be started. Owned by the broker."""

    name: str
    # The order of arrival: the files are read after it was taken.
    number: int
    since: float
    need: Need
    answer: asyncio.Future[int]
    # Others have to leave for it.
    is_swap: bool = False

    @property
    def claim(self) -> LoadClaim:
        return LoadClaim(self.name, self.need.least, self.need.floor, self.need.most)


@dataclass(slots=True)
class Allocation:
    """A worker that has been given memory, from the grant to the end of its process. Owned by the broker."""

    name: str
    share: int
    floor: int
    most: int
    used_at: float
    pressure: Pressure
    # When it was asked for; None once it is ready, and for an adopted one.
    asked_at: float | None = None
    is_swap: bool = False
    gated_at: float | None = None
    # What its worker was told to shrink to, and until when that may take.
    shrinking_to: int | None = None
    shrink_ends: float = 0.0
    # Why it was told to go.
    leaving: str = ""
    pid: int = 0
    footprint: int = 0
    # What the machine had left when it was told to go.
    available: int = 0

    @property
    def held(self) -> int:
        """Bytes that count against the budget: its share, or the measured footprint if that is more."""
        return max(self.share, self.footprint)


@dataclass(frozen=True, slots=True)
class MemoryReturn:
    """A process that has ended, and what it held: counted until it was measured to be back."""

    name: str
    pid: int
    share: int
    footprint: int
    available: int
    since: float
