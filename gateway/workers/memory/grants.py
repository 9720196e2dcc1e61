"""Records of the memory broker: pending grants, allocations, and memory of ended processes that is not free yet."""

import asyncio
from dataclasses import dataclass

from gateway.workers.memory.estimate import Need
from gateway.workers.memory.policy import LoadClaim
from gateway.workers.memory.pressure import Pressure


@dataclass(slots=True)
class PendingGrant:
    """Memory grant that a worker waits for. Owned by the broker."""

    name: str
    # Serial number that orders grants by arrival. It is taken before the model's files are read, because reading may
    # take longer for an earlier request.
    number: int
    since: float
    need: Need
    answer: asyncio.Future[int]
    # Whether other models are evicted for this grant.
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
    # Time at which the model was requested; None once the model is ready, and for an adopted worker.
    requested_at: float | None = None
    is_swap: bool = False
    gated_at: float | None = None
    # Share to which the worker was ordered to shrink.
    shrinking_to: int | None = None
    # Deadline of the order to shrink.
    shrink_ends: float = 0.0
    # Reason of the worker's eviction; empty if there is none.
    evict_reason: str = ""
    pid: int = 0
    footprint: int = 0
    # Free memory of the machine when the worker was evicted.
    available: int = 0

    @property
    def held(self) -> int:
        """Bytes that count against the budget: the share or the measured footprint, whichever is larger."""
        return max(self.share, self.footprint)


@dataclass(frozen=True, slots=True)
class MemoryReturn:
    """Memory of a process that has ended; it counts against the budget until it is measured as free."""

    name: str
    pid: int
    share: int
    footprint: int
    available: int
    since: float
