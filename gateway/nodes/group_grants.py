"""Memory of a group over hosts: each host's grant in one order of all hosts, all of them or none.

Hosts are asked in the order of their public keys, which is the same from wherever it is looked at, and each is asked
once the one before has granted. So two groups that want the same hosts never hold what the other waits for. A host
that has granted takes it back by itself after a time, also from a gateway that is gone.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from gateway.nodes.agent_client import AgentClient, NodeLost, NodeRefused
from gateway.workers.supervisor.state import ModelUnavailable
from protocol.failures import Code, Failure
from protocol.node_agent import Commit, Done, Release, Reserve, Reserved

log = logging.getLogger(__name__)

# All grants of a group come within this, or those that came are given back and it begins again after a pause.
ROUND_S: Final = 60.0
PAUSE_S: Final = (0.5, 3.0)
# Beyond the round, for the way of the last message.
TTL_SPARE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class RankNeed:
    """One rank at another node, and the bytes that it needs there."""

    client: AgentClient
    rank: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """A group's claims. `form` is the model's here, `model` the path or repository that it has here."""

    group: str
    model: str
    form: str
    size: int
    ranks: Sequence[RankNeed]


@dataclass(slots=True)
class Grants:
    """Memory of a whole group: this host's share in bytes, and the reservation of each rank elsewhere."""

    share_bytes: int
    reservations: dict[int, tuple[AgentClient, int]]

    def release(self) -> None:
        """Give back what is elsewhere and was not taken over by a process."""
        for client, reservation in self.reservations.values():
            client.tell(Release(0, reservation))
            client.forget(reservation)
        self.reservations.clear()


class GroupGrants:
    """Acquires memory for groups. `own_public` is this node's place in the order of hosts."""

    def __init__(self, own_public: str, *, round_s: float = ROUND_S, pause_s: tuple[float, float] = PAUSE_S) -> None:
        self._own_public = own_public
        self._round_s = round_s
        self._pause_s = pause_s

    async def acquire(
        self, wanted: Wanted, admit: Callable[[], Awaitable[int]], withdraw: Callable[[], None]
    ) -> Grants:
        """Wait until every host has granted. May be cancelled. Raises `ModelUnavailable`.

        `admit` is the broker of this host, `withdraw` gives its grant back.
        """
        while True:
            limit = asyncio.timeout(self._round_s)
            try:
                async with limit:
                    return await self._round(wanted, admit, withdraw)
            except TimeoutError:
                if not limit.expired():
                    raise
                log.info("%s: not every node had memory within %.0f s; again", wanted.group, self._round_s)
            await asyncio.sleep(random.uniform(*self._pause_s))

    async def _round(self, wanted: Wanted, admit: Callable[[], Awaitable[int]], withdraw: Callable[[], None]) -> Grants:
        grants, is_admitted = Grants(0, {}), False
        hosts = [*wanted.ranks, None]  # None is this host
        with ExitStack() as undo:
            undo.callback(lambda: withdraw() if is_admitted else None)
            undo.callback(grants.release)  # whatever ends it, none is kept
            for host in sorted(hosts, key=lambda each: self._own_public if each is None else each.client.public):
                if host is None:
                    grants.share_bytes = await admit()
                    is_admitted = True
                else:
                    await self._reserve(wanted, host, grants)
            for client, reservation in grants.reservations.values():
                await self._commit(client, reservation)
            undo.pop_all()
        return grants

    async def _reserve(self, wanted: Wanted, host: RankNeed, grants: Grants) -> None:
        client, reservation = host.client, host.client.number()
        ttl_s = self._round_s + TTL_SPARE_S
        client.hold(reservation)
        grants.reservations[host.rank] = client, reservation
        try:
            reserved = await client.ask(
                lambda call: Reserve(
                    call,
                    reservation,
                    wanted.group,
                    wanted.model,
                    wanted.form,
                    host.rank,
                    wanted.size,
                    host.size_bytes,
                    ttl_s,
                ),
                Reserved,
                2 * self._round_s,  # the round ends first, but for an agent that is lost
            )
        except NodeLost as error:
            raise ModelUnavailable(_lost(wanted, str(error)), 1.0) from None
        except NodeRefused as error:
            raise ModelUnavailable(_refused(wanted, client, error)) from None
        if reserved.size_bytes < host.size_bytes or reserved.form != wanted.form:
            # It answers something else than it was asked for: nothing that it says can be relied on.
            why = f"node {client.name} has reserved {reserved.size_bytes} bytes of {reserved.form[:8] or 'no form'}"
            raise ModelUnavailable(Failure(Code.INCOMPATIBLE, f"{wanted.group} cannot be loaded: {why}"))

    async def _commit(self, client: AgentClient, reservation: int) -> None:
        try:
            await client.ask(lambda call: Commit(call, reservation), Done)
        except (NodeLost, NodeRefused) as error:
            why = f"the memory of node {client.name} was not kept: {error}"
            raise ModelUnavailable(Failure(Code.BUSY, why), 1.0) from None


def _lost(wanted: Wanted, why: str) -> Failure:
    return Failure(Code.BUSY, f"{wanted.group} cannot be loaded now: {why}")


def _refused(wanted: Wanted, client: AgentClient, error: NodeRefused) -> Failure:
    return Failure(error.failure.code, f"{wanted.group} cannot be loaded: node {client.name}: {error.failure.message}")
