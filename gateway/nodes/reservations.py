"""Reservations of an agent: the memory and the process of one rank each, owned by the key that asked for it."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gateway.workers.supervisor.ports import WorkerPort
from protocol.failures import Code, Failure
from protocol.node_agent import Reserve

# Ranks of a group, and how long memory may be held for a group that is not complete.
RANKS_MAX: Final = 64
TTL_MAX_S: Final = 300.0
NAME_CHARS_MAX: Final = 256


class Stage(Enum):
    """Stage of a reservation; it only ever goes down this list."""

    WAITING = auto()
    HELD = auto()
    COMMITTED = auto()
    RUNNING = auto()
    ENDING = auto()


@dataclass(slots=True)
class Reservation:
    """One rank of another gateway's group. Owned by the agent's table."""

    owner: str
    # The route to the connection that asked.
    identity: bytes
    order: Reserve
    # Its name in logs and in the broker, from its first moment to its last: the node may be renamed meanwhile.
    label: str
    stage: Stage = Stage.WAITING
    # The folder of this machine's own copy of the model.
    path: str = ""
    # While it is held: when it is taken back.
    expires_at: float = 0.0
    process: WorkerPort | None = None
    # Of the wait for memory, and of the end of the process.
    task: asyncio.Task[None] | None = None

    @property
    def number(self) -> int:
        return self.order.reservation


class Reservations:
    """All reservations of an agent, bounded in all and by owner."""

    def __init__(self, most: int, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._by_owner: dict[str, dict[int, Reservation]] = {}

    def __iter__(self) -> Iterator[Reservation]:
        return iter([each for own in self._by_owner.values() for each in own.values()])

    def find(self, owner: str, number: int) -> Reservation | None:
        """The reservation of this very key: numbers of others' are none."""
        return self._by_owner.get(owner, {}).get(number)

    def of(self, owner: str) -> list[Reservation]:
        return list(self._by_owner.get(owner, {}).values())

    def owners(self) -> list[str]:
        return list(self._by_owner)

    def refusal(self, owner: str, order: Reserve) -> Failure | None:
        """The reason why this reservation cannot be made."""
        if problem := _problem(order):
            return Failure(Code.INVALID_REQUEST, problem)
        if self.find(owner, order.reservation) is not None:
            return Failure(Code.INVALID_REQUEST, f"reservation {order.reservation} exists")
        if len(self.of(owner)) >= self._most_of_one:
            return Failure(Code.BUSY, f"this node has {self._most_of_one} reservations here, which is the most")
        if sum(map(len, self._by_owner.values())) >= self._most:
            return Failure(Code.BUSY, f"there are {self._most} reservations, which is the most")
        return None

    def add(self, reservation: Reservation) -> None:
        self._by_owner.setdefault(reservation.owner, {})[reservation.number] = reservation

    def remove(self, reservation: Reservation) -> None:
        own = self._by_owner.get(reservation.owner, {})
        if own.get(reservation.number) is reservation:
            del own[reservation.number]
            if not own:
                del self._by_owner[reservation.owner]


def _problem(order: Reserve) -> str:
    if not 0 <= order.rank < order.size <= RANKS_MAX:
        return f"rank {order.rank} of {order.size}"
    if order.size_bytes < 1:
        return "a reservation is of some bytes"
    if not 0 < order.ttl_s <= TTL_MAX_S:
        return f"a reservation is held for at most {TTL_MAX_S:.0f} s"
    names = (order.group, order.model, order.form)
    if any(len(name) > NAME_CHARS_MAX or not name.isprintable() for name in names) or not order.form:
        return "names are printable, and a model is named by its form"
    return ""


def label_of(order: Reserve, node: str) -> str:
    """The label of a reservation of this node. No model can have it: names of models have no spaces."""
    return f"rank {order.rank} of {order.group} ({node}, {order.reservation})"
