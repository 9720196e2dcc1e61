"""Records of the broker: pending grants, allocations, and memory that ended processes return."""

import asyncio
from dataclasses import dataclass

from gateway.workers.memory.estimate import Need
from gateway.workers.memory.policy import LoadClaim
from gateway.workers.memory.pressure import Pressure


@dataclass(slots=True)
class PendingGrant:
    """Grant that a worker waits for. Owned by the broker."""

    name: str
    # Order of arrival, taken before the model's files are read.
    number: int
    since: float
    need: Need
    answer: asyncio.Future[int]
    # Whether other models are evicted for it.
    is_swap: bool = False

    @property
    def claim(self) -> LoadClaim:
        return LoadClaim(self.name, self.need.least, self.need.floor, self.need.most)


@dataclass(slots=True)
class Allocation:
    """Memory of a worker, from the grant to the end of its process. Owned by the broker."""

    name: str
    share: int
    floor: int
    most: int
    used_at: float
    pressure: Pressure
    # When the model was requested; None after it is ready, and for an adopted worker.
    requested_at: float | None = None
    is_swap: bool = False
    gated_at: float | None = None
    # Share that its worker was ordered to shrink to, and the deadline for it.
    shrinking_to: int | None = None
    shrink_ends: float = 0.0
    # Empty while it is not evicted.
    evict_reason: str = ""
    pid: int = 0
    footprint: int = 0
    # Free memory of the machine at its eviction.
    available: int = 0

    @property
    def held(self) -> int:
        """Bytes that count against the budget: the larger of its share and its measured footprint."""
        return max(self.share, self.footprint)


@dataclass(frozen=True, slots=True)
class MemoryReturn:
    """Memory of a process that has ended, which counts until its return is measured."""

    name: str
    pid: int
    share: int
    footprint: int
    available: int
    since: float
