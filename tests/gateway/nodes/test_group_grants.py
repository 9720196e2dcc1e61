"""Memory of groups over hosts: all or none, no two groups in each other's way for good, and hosts that lie."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest

from gateway.nodes.agent_client import AgentClient
from gateway.nodes.group_grants import Grants, GroupGrants, RankNeed, Wanted
from gateway.nodes.this_host import ThisHost
from gateway.workers.supervisor.state import ModelUnavailable
from protocol.failures import Code
from protocol.node_agent import Reserved
from tests.gateway.nodes.hosts import DEADLINE_S, MIB, Host, client, form, host
from tests.support.pool import short_home, until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
PAUSE_S = 0.01, 0.05


@dataclass(slots=True)
class Office:
    """Two hosts, each with a gateway that knows the other. `links` are the connections from one to the other."""

    hosts: tuple[Host, Host]
    links: tuple[AgentClient, AgentClient]

    def group(
        self, owner: int, name: str, size_bytes: int, *, round_s: float = patient(DEADLINE_S), **wanted: str
    ) -> "Asking":
        """A group of the owner with a rank on each host, as it asks for memory."""
        own, link = self.hosts[owner], self.links[owner]
        claims = Wanted(name, "demo", wanted.get("form", form(own)), 2, [RankNeed(link, 1, size_bytes)])

        async def admit() -> int:
            await own.broker.admit_guest(name, size_bytes)
            return size_bytes

        grants = GroupGrants(own.keys.public, round_s=round_s, pause_s=PAUSE_S)
        return Asking(
            own, name, asyncio.create_task(grants.acquire(claims, admit, lambda: own.broker.end_guest(name, 0)))
        )

    @property
    def held(self) -> list[int]:
        return [each.held for each in self.hosts]


@dataclass(slots=True)
class Asking:
    own: Host
    name: str
    task: asyncio.Task[Grants]

    async def granted(self) -> Grants:
        return await asyncio.wait_for(asyncio.shield(self.task), patient(DEADLINE_S))

    async def end(self) -> None:
        """The group is unloaded: all memory of it is given back."""
        (await self.granted()).release()
        self.own.broker.end_guest(self.name, 0)


@asynccontextmanager
async def office(budget: int = 1000 * MIB) -> AsyncGenerator[Office]:
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(host(stack.enter_context(short_home()), name, budget=budget))
            for name in ("studio1", "studio2")
        ]
        there = await stack.enter_async_context(client(other, one.keys, "studio1"))
        back = await stack.enter_async_context(client(one, other.keys, "studio2"))
        yield Office((one, other), (there, back))


async def test_a_group_has_memory_on_all_hosts_and_gives_all_of_it_back() -> None:
    async with office() as both:
        group = both.group(0, "big", 300 * MIB)
        assert (await group.granted()).share_bytes == 300 * MIB
        assert both.held == [300 * MIB, 300 * MIB]

        await group.end()
        await until(lambda: both.held == [0, 0])


async def test_two_groups_over_the_same_hosts_come_one_after_the_other_and_never_lock() -> None:
    async with office() as both:
        for _ in range(5):
            first, second = both.group(0, "big", 600 * MIB), both.group(1, "huge", 600 * MIB)
            await asyncio.wait(
                {first.task, second.task}, timeout=patient(DEADLINE_S), return_when=asyncio.FIRST_COMPLETED
            )
            winner, loser = (first, second) if first.task.done() else (second, first)
            # The other holds nothing that the first one needs.
            assert not loser.task.done()
            assert both.held == [600 * MIB, 600 * MIB]
            await winner.end()
            await loser.end()
            await until(lambda: both.held == [0, 0])


async def test_hosts_are_asked_in_one_order_so_that_a_group_that_waits_holds_nothing_of_the_next_host() -> None:
    async with office() as both:
        first = min(range(2), key=lambda at: both.hosts[at].keys.public)
        await both.hosts[first].broker.admit_guest("else", 700 * MIB)
        for owner in range(2):
            group = both.group(owner, "big", 600 * MIB)
            await until(lambda: both.hosts[first].broker.has_waiters)
            assert both.hosts[1 - first].held == 0
            group.task.cancel()
            await asyncio.wait([group.task])
            await until(lambda: not both.hosts[first].broker.has_waiters)


async def test_a_round_that_takes_too_long_gives_everything_back_and_begins_again() -> None:
    async with office() as both:
        last = max(range(2), key=lambda at: both.hosts[at].keys.public)
        await both.hosts[last].broker.admit_guest("else", 700 * MIB)
        group = both.group(0, "big", 600 * MIB, round_s=0.1)
        first = both.hosts[1 - last]
        await until(lambda: first.held == 600 * MIB)
        await until(lambda: first.held == 0)

        both.hosts[last].broker.end_guest("else", 0)

        await group.granted()
        assert both.held == [600 * MIB, 600 * MIB]


async def test_a_host_that_can_never_have_the_memory_is_named_and_the_others_get_theirs_back() -> None:
    async with office(budget=500 * MIB) as both:
        group = both.group(0, "big", 600 * MIB)
        with pytest.raises(ModelUnavailable) as caught:
            await group.granted()
        assert caught.value.failure.code is Code.DOES_NOT_FIT
        await until(lambda: both.held == [0, 0])


async def test_a_host_without_the_model_in_this_form_is_named_before_anything_is_loaded() -> None:
    async with office() as both:
        group = both.group(0, "big", MIB, form="0" * 40)
        with pytest.raises(ModelUnavailable, match="node studio2: has no model of the form") as caught:
            await group.granted()
        assert caught.value.failure.code is Code.MODEL_MISSING
        await until(lambda: both.held == [0, 0])


async def test_a_wait_for_memory_that_is_given_up_leaves_nothing_anywhere() -> None:
    async with office() as both:
        for at in range(2):
            await both.hosts[at].broker.admit_guest("else", 700 * MIB)
            group = both.group(0, "big", 600 * MIB)
            await until(lambda: any(each.broker.has_waiters for each in both.hosts))
            group.task.cancel()
            await asyncio.wait([group.task])
            both.hosts[at].broker.end_guest("else", 0)
            await until(lambda: both.held == [0, 0])


async def test_a_host_that_is_lost_is_named_and_the_others_get_theirs_back() -> None:
    async with office() as both:
        await both.hosts[1].broker.admit_guest("else", 700 * MIB)
        group = both.group(0, "big", 600 * MIB)
        await until(lambda: both.hosts[1].broker.has_waiters or both.hosts[0].held > 0)
        await both.hosts[1].stop_agent()

        with pytest.raises(ModelUnavailable, match="studio2") as caught:
            await group.granted()
        assert caught.value.failure.is_retryable
        await until(lambda: both.hosts[0].held == 0)


@pytest.mark.parametrize("lie", [{"form": "f" * 40}, {"size_bytes": 1}])
async def test_an_agent_that_grants_something_else_than_it_was_asked_for_is_not_believed(
    lie: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with office() as both:
        import msgspec

        honest = AgentClient._handle

        def lying(self: AgentClient, answer: object) -> None:
            honest(self, msgspec.structs.replace(answer, **lie) if isinstance(answer, Reserved) else answer)  # type: ignore[arg-type]

        monkeypatch.setattr(AgentClient, "_handle", lying)
        group = both.group(0, "big", 100 * MIB)
        with pytest.raises(ModelUnavailable, match="node studio2 has reserved") as caught:
            await group.granted()
        assert caught.value.failure.code is Code.INCOMPATIBLE
        await until(lambda: both.held == [0, 0])


async def test_an_agent_that_claims_free_memory_it_has_not_is_found_out_by_its_grant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with office() as both:
        far = both.hosts[1]
        await far.broker.admit_guest("else", 700 * MIB)
        honest = ThisHost.describe

        def lying(self: ThisHost, call: int, form: str) -> object:
            import msgspec

            return msgspec.structs.replace(honest(self, call, form), free_bytes=1 << 50)

        monkeypatch.setattr(ThisHost, "describe", lying)
        group = both.group(0, "big", 600 * MIB, round_s=0.1)
        await until(lambda: far.broker.has_waiters)
        # What it says of its memory grants nothing: its broker does.
        assert not group.task.done()
        group.task.cancel()
        await asyncio.wait([group.task])
        await until(lambda: both.held == [0, 700 * MIB])
