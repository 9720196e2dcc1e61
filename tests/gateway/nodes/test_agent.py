"""The agent of a node: orders of gateways that it knows, and all that it refuses them."""

import asyncio
import signal
from collections.abc import Awaitable

import msgspec
import psutil
import pytest
import zmq.asyncio

from gateway.nodes.agent_client import AgentClient, NodeLost, NodeRefused
from gateway.nodes.remote_rank import NOT_STARTED, RemoteRank
from gateway.nodes.this_host import versions
from protocol import sockets
from protocol.curve import make_pair
from protocol.failures import Code
from protocol.node_agent import (
    Commit,
    Describe,
    Described,
    Done,
    Lines,
    Logs,
    Order,
    Release,
    Reserve,
    Reserved,
    Signal,
    Spawn,
    Spawned,
)
from protocol.spec import GroupSpec
from tests.gateway.nodes.hosts import (
    BUDGET,
    DEADLINE_S,
    ENDS,
    MIB,
    SHORT_S,
    SILENCE_S,
    Host,
    client,
    form,
    pair,
    rank_of,
    rank_spec,
)
from tests.support.pool import until
from tests.support.scale import patient

pytestmark = pytest.mark.anyio
THREE = GroupSpec(("local", "studio2", "studio3"), "pipeline", "ring")


async def reserve(
    far: Host, gateway: AgentClient, size_bytes: int = 100 * MIB, ttl_s: float = 60.0, **fields: object
) -> int:
    """A reservation that holds its memory."""
    number = gateway.number()
    gateway.hold(number)
    made = Reserve(0, number, "big#3", "demo", form(far), 1, 2, size_bytes, ttl_s)
    wanted = msgspec.structs.replace(made, **fields)
    await gateway.ask(lambda call: msgspec.structs.replace(wanted, call=call), Reserved, patient(DEADLINE_S))
    return number


async def commit(gateway: AgentClient, number: int) -> None:
    await gateway.ask(lambda call: Commit(call, number), Done, patient(DEADLINE_S))


async def spawn(gateway: AgentClient, number: int, body: bytes = msgspec.json.encode(rank_spec())) -> int:
    return (await gateway.ask(lambda call: Spawn(call, number, body), Spawned, patient(DEADLINE_S))).pid


async def started(far: Host, gateway: AgentClient) -> tuple[RemoteRank, psutil.Process]:
    """A rank that runs at the far host, and its process there."""
    number = await reserve(far, gateway)
    await commit(gateway, number)
    rank = RemoteRank(gateway, number, rank_spec())
    await until(lambda: rank.pid != 0)
    return rank, psutil.Process(rank.pid)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


async def refused(asking: Awaitable[object], code: Code) -> str:
    with pytest.raises(NodeRefused) as caught:
        await asking
    assert caught.value.failure.code is code
    return caught.value.failure.message


async def test_a_node_tells_its_memory_its_versions_and_whether_it_has_the_model() -> None:
    async with pair() as (far, gateway):
        said = await gateway.ask(lambda call: Describe(call, "demo", form(far)), Described, patient(DEADLINE_S))
        other = await gateway.ask(lambda call: Describe(call, "demo", "0" * 40), Described, patient(DEADLINE_S))

        assert (said.node, said.versions, said.form) == ("studio2", versions(), form(far))
        assert said.budget_bytes == BUDGET >= said.free_bytes > 0
        assert other.form == ""


async def test_a_rank_runs_with_its_memory_and_both_end_together() -> None:
    async with pair() as (far, gateway):
        rank, process = await started(far, gateway)
        assert far.held == 100 * MIB

        rank.signal(signal.SIGKILL)
        assert await asyncio.wait_for(rank.wait(), patient(DEADLINE_S)) == -signal.SIGKILL
        rank.close()

        assert has_ended(process)
        await until(lambda: far.held == 0)


async def test_the_status_and_the_last_lines_of_a_rank_come_back() -> None:
    async with pair() as (far, gateway):
        far.ranks.code = ENDS
        number = await reserve(far, gateway)
        await commit(gateway, number)
        rank = RemoteRank(gateway, number, rank_spec())

        assert await asyncio.wait_for(rank.wait(), patient(DEADLINE_S)) == 66
        assert rank.last_lines() == ["ERROR no such tensor"]


async def test_the_output_of_a_rank_that_runs_can_be_read() -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway)
        await commit(gateway, number)
        await spawn(gateway, number)
        async with asyncio.timeout(patient(DEADLINE_S)):
            while (await gateway.ask(lambda call: Logs(call, number), Lines)).lines != ["INFO rank is up"]:  # noqa: ASYNC110 - the agent tells nobody
                await asyncio.sleep(0.01)


async def test_a_rank_gets_no_path_socket_or_code_of_the_gateway_that_asks() -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway, group="--spec#3")
        await commit(gateway, number)
        hostile = rank_spec(
            name="--spec",
            path="/etc",
            rank=rank_of(beside=7),
            trust_remote_code=True,
            disk_cache_dir="/tmp/x",
            memory_bytes=1 << 50,
        )
        await spawn(gateway, number, msgspec.json.encode(hostile))

        (spec,) = far.ranks.specs
        assert (spec.path, spec.down, spec.up) == ("demo", "ipc://down", "ipc://up")
        assert (spec.trust_remote_code, spec.disk_cache_dir, spec.memory_bytes) == (False, "", 100 * MIB)
        assert spec.group == hostile.group
        assert spec.rank == rank_of(is_reserved=True, beside=1), "its memory is its own, and the most that it takes"
        # Behind its name stand options of the command line.
        assert not spec.name.startswith("-")
        assert " " not in spec.name


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (b"{", "truncated"),
        (b'{"command": ["rm"]}', "Object"),
        (msgspec.json.encode(rank_spec(rank=None)), "a follower's specification"),
        (msgspec.json.encode(rank_spec(group=None)), "a follower's specification"),
        (msgspec.json.encode(rank_spec(rank=rank_of(rank=0))), "a follower's specification"),
        (msgspec.json.encode(rank_spec(rank=rank_of(plan="ipc:///tmp/x"))), "by TCP"),
        (msgspec.json.encode(rank_spec(rank=rank_of(ip="203.0.113.9"))), "no address of this machine"),
        (msgspec.json.encode(rank_spec(rank=rank_of(ip="0.0.0.0; rm"))), "no IPv4 address"),
        (msgspec.json.encode(rank_spec(epoch=1 << 60)), "is none"),
        (msgspec.json.encode(rank_spec(name="other")), "of other#3, and the memory was reserved for big#3"),
        (msgspec.json.encode(rank_spec(epoch=4)), "of big#4, and the memory was reserved for big#3"),
        (msgspec.json.encode(rank_spec(rank=rank_of(rank=2), group=THREE)), "rank 2 of 3, and the memory was reserved"),
        (msgspec.json.encode(rank_spec(group=THREE)), "rank 1 of 3, and the memory was reserved for rank 1 of 2"),
    ],
)
async def test_what_is_no_specification_of_a_follower_starts_nothing(spec: bytes, why: str) -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway)
        await commit(gateway, number)
        assert why in await refused(spawn(gateway, number, spec), Code.INTERNAL)
        assert far.ranks.started == []


async def test_a_rank_that_cannot_be_started_is_an_exit_with_its_reason() -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway)
        await commit(gateway, number)
        rank = RemoteRank(gateway, number, rank_spec(rank=None))
        assert await asyncio.wait_for(rank.wait(), patient(DEADLINE_S)) == NOT_STARTED
        assert "studio2: the rank cannot be started" in rank.last_lines()[0]


async def test_a_model_that_the_node_has_not_in_that_form_is_refused() -> None:
    async with pair() as (far, gateway):
        said = await refused(reserve(far, gateway, form="0" * 40), Code.MODEL_MISSING)
        assert "has no model of the form 00000000 (demo)" in said
        # A path of the gateway that asks is a hint, and never opened.
        await refused(reserve(far, gateway, form="0" * 40, model="/etc/passwd"), Code.MODEL_MISSING)
        assert far.held == 0


async def test_memory_that_there_can_never_be_is_refused_at_once() -> None:
    async with pair() as (far, gateway):
        said = await refused(reserve(far, gateway, BUDGET + 1), Code.DOES_NOT_FIT)
        assert said.startswith("rank 1 of big#3 (studio1, ")
        assert far.held == 0


async def test_memory_is_waited_for_and_granted_when_it_is_there() -> None:
    async with pair() as (far, gateway):
        first = await reserve(far, gateway, 700 * MIB)
        second = asyncio.create_task(reserve(far, gateway, 700 * MIB))
        await until(lambda: far.broker.has_waiters)
        assert far.held == 700 * MIB

        await gateway.ask(lambda call: Release(call, first), Done, patient(DEADLINE_S))

        await asyncio.wait_for(second, patient(DEADLINE_S))
        assert far.held == 700 * MIB


async def test_a_wait_that_is_given_up_leaves_nothing() -> None:
    async with pair() as (far, gateway):
        await reserve(far, gateway, 700 * MIB)
        number = gateway.number()
        gateway.tell(Reserve(0, number, "other#1", "demo", form(far), 1, 2, 700 * MIB, 60.0))
        await until(lambda: far.broker.has_waiters)

        await gateway.ask(lambda call: Release(call, number), Done, patient(DEADLINE_S))

        await until(lambda: not far.broker.has_waiters)
        assert far.held == 700 * MIB


async def test_memory_that_is_not_committed_in_time_is_taken_back() -> None:
    async with pair() as (far, gateway):
        kept = await reserve(far, gateway, ttl_s=patient(DEADLINE_S))
        await commit(gateway, kept)
        late = await reserve(far, gateway, ttl_s=0.05)

        await until(lambda: far.held == 100 * MIB)

        assert "there is no reservation" in await refused(commit(gateway, late), Code.INVALID_REQUEST)
        assert (await gateway.ask(lambda call: Logs(call, kept), Lines, patient(DEADLINE_S))).lines == []


async def test_what_a_gateway_does_not_have_any_more_is_given_back_although_nothing_was_heard_of_it() -> None:
    async with pair() as (far, gateway):
        kept, lost = await reserve(far, gateway), await reserve(far, gateway)
        await commit(gateway, lost)
        gateway.forget(lost)  # its order to release it was lost with a connection

        await until(lambda: far.held == 100 * MIB)
        await commit(gateway, kept)


class Lossy(AgentClient):
    """Client whose signals are lost, as with a connection that is just being made again."""

    def tell(self, order: Order) -> None:
        if not isinstance(order, Signal):
            super().tell(order)


async def test_a_rank_that_is_not_known_to_have_ended_after_its_kill_is_given_up_and_ends() -> None:
    async with pair(SHORT_S) as (far, _):
        keys = make_pair()
        far.known[keys.public] = "studio3"
        gateway = Lossy("studio2", far.agent.endpoint, far.keys.public, keys, silence_s=SILENCE_S, pulse_s=0.05)
        gateway.open()
        number = await reserve(far, gateway)
        await commit(gateway, number)
        rank = RemoteRank(gateway, number, rank_spec(), kill_s=0.1)
        await until(lambda: rank.pid != 0)
        process = psutil.Process(rank.pid)
        rank.signal(signal.SIGKILL)

        assert await asyncio.wait_for(rank.wait(), patient(DEADLINE_S)) is None
        await until(lambda: has_ended(process))
        await until(lambda: far.held == 0)
        await gateway.close()


async def test_a_rank_of_a_node_whose_connection_was_closed_has_ended() -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway)
        await gateway.close()
        rank = RemoteRank(gateway, number, rank_spec())
        assert await asyncio.wait_for(rank.wait(), patient(DEADLINE_S)) is None
        rank.close()


async def test_ranks_of_a_gateway_that_has_vanished_end_and_their_memory_is_free() -> None:
    async with pair(SHORT_S) as (far, gateway):
        _, process = await started(far, gateway)
        await gateway.close()  # nothing is said: as if its machine had lost its power

        await until(lambda: has_ended(process))
        await until(lambda: far.held == 0)


async def test_memory_is_free_after_its_gateway_was_renamed_or_removed() -> None:
    async with pair() as (far, gateway):
        await reserve(far, gateway)
        rank, _ = await started(far, gateway)
        far.known.update(dict.fromkeys(far.known, "renamed"))
        rank.signal(signal.SIGKILL)
        await until(lambda: far.held == 100 * MIB)

        far.known.clear()
        await until(lambda: far.held == 0)


async def test_ranks_end_with_the_daemon_of_their_node_and_their_gateway_is_told() -> None:
    async with pair() as (far, gateway):
        rank, process = await started(far, gateway)
        await far.stop_agent()

        assert await asyncio.wait_for(rank.wait(), patient(DEADLINE_S)) == -signal.SIGKILL
        assert rank.last_lines() == ["the daemon of its node has ended"]
        await until(lambda: has_ended(process))


async def test_a_node_that_obeys_no_more_ends_its_ranks_on_both_sides() -> None:
    async with pair() as (far, gateway):
        rank, process = await started(far, gateway)
        far.known.clear()  # the node has removed ours: to us that is silence

        assert await asyncio.wait_for(rank.wait(), patient(DEADLINE_S)) in (None, -signal.SIGTERM)
        await until(lambda: has_ended(process))
        with pytest.raises(NodeLost):
            await gateway.ask(lambda call: Describe(call), Described, 0.2)


async def test_a_node_that_forgot_a_rank_has_ended_it_for_the_gateway() -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway, ttl_s=0.05)
        rank = RemoteRank(gateway, number, rank_spec())  # never committed: refused, or gone by then
        assert await asyncio.wait_for(rank.wait(), patient(DEADLINE_S)) in (None, NOT_STARTED)


async def test_a_gateway_touches_no_reservation_of_another_one() -> None:
    async with pair() as (far, gateway), client(far, make_pair(), "studio3") as other:
        number = await reserve(far, gateway)
        body = msgspec.json.encode(rank_spec())
        for order in (
            Commit(0, number),
            Release(0, number),
            Spawn(0, number, body),
            Signal(0, number, signal.SIGKILL),
            Logs(0, number),
        ):
            asking = other.ask(
                lambda call, order=order: msgspec.structs.replace(order, call=call), Done, patient(DEADLINE_S)
            )
            assert "there is no" in await refused(asking, Code.INVALID_REQUEST)
        assert far.held == 100 * MIB
        # The same number is another reservation there.
        own = Reserve(0, number, "its#1", "demo", form(far), 1, 2, MIB, 60.0)
        await other.ask(lambda call: msgspec.structs.replace(own, call=call), Reserved, patient(DEADLINE_S))
        assert far.held == 101 * MIB


async def test_an_order_that_comes_twice_does_nothing_twice() -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway)
        again = Reserve(0, number, "big#3", "demo", form(far), 1, 2, 100 * MIB, 60.0)
        asking = gateway.ask(lambda call: msgspec.structs.replace(again, call=call), Reserved, patient(DEADLINE_S))
        assert await refused(asking, Code.INVALID_REQUEST) == f"reservation {number} exists"
        await commit(gateway, number)
        await refused(commit(gateway, number), Code.INVALID_REQUEST)
        await spawn(gateway, number)
        await refused(spawn(gateway, number), Code.INVALID_REQUEST)
        assert len(far.ranks.started) == 1
        assert far.held == 100 * MIB


async def test_a_rank_is_not_started_before_its_memory_is_committed() -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway)
        assert await refused(spawn(gateway, number), Code.INVALID_REQUEST) == f"reservation {number} is held"


async def test_reservations_beyond_the_bounds_are_refused() -> None:
    async with pair() as (far, gateway), client(far, make_pair(), "studio3") as other:
        for _ in range(16):
            await reserve(far, gateway, MIB)
        assert "16 reservations here" in await refused(reserve(far, gateway, MIB), Code.BUSY)
        for _ in range(16):
            await reserve(far, other, MIB)
        async with client(far, make_pair(), "studio4") as third:
            assert "there are 32 reservations" in await refused(reserve(far, third, MIB), Code.BUSY)
        assert far.held == 32 * MIB


async def test_reservations_that_make_no_sense_are_refused() -> None:
    senseless: list[dict[str, object]] = [
        {"rank": 2},
        {"rank": -1},
        {"size": 65, "rank": 64},
        {"size_bytes": 0},
        {"size_bytes": -5},
        {"ttl_s": 0.0},
        {"ttl_s": 1e9},
        {"ttl_s": float("nan")},
        {"group": "x" * 300},
        {"group": "a\nb"},
        {"form": ""},
    ]
    async with pair() as (far, gateway):
        for fields in senseless:
            await refused(reserve(far, gateway, **fields), Code.INVALID_REQUEST)  # type: ignore[arg-type]
        assert far.held == 0


async def test_only_signals_that_end_a_process_are_sent() -> None:
    async with pair() as (far, gateway):
        number = await reserve(far, gateway)
        await commit(gateway, number)
        await spawn(gateway, number)
        asking = gateway.ask(lambda call: Signal(call, number, signal.SIGSTOP), Done, patient(DEADLINE_S))
        assert await refused(asking, Code.INVALID_REQUEST) == f"signal {int(signal.SIGSTOP)} is not sent"


async def test_frames_that_are_no_orders_are_dropped_and_the_agent_goes_on() -> None:
    async with pair() as (far, gateway):
        own = make_pair()
        far.known[own.public] = "studio3"
        context = zmq.asyncio.Context()
        raw = sockets.connect_secure_dealer(context, f"tcp://{far.agent.endpoint}", b"raw", far.keys.public, own)
        async with asyncio.timeout(patient(DEADLINE_S)):
            for frame in (b"", b"\xc1", b"\x93\x63\x01\x02", b"\x91\x01", bytes(5000)):
                await raw.send(frame)
            await raw.send_multipart([b"two", b"frames"])
        said = await gateway.ask(lambda call: Describe(call), Described, patient(DEADLINE_S))
        assert said.node == "studio2"
        context.destroy(0)


async def trouble(gateway: AgentClient, word: str) -> None:
    """Ask until the reason why there is no answer has this word."""
    gateway.open()
    told = ""
    end = asyncio.get_running_loop().time() + patient(DEADLINE_S)
    while word not in told:
        assert asyncio.get_running_loop().time() < end, told
        with pytest.raises(NodeLost) as caught:
            await gateway.ask(lambda call: Describe(call), Described, 0.05)
        told = str(caught.value)
    await gateway.close()
    assert "studio2" in told


async def test_a_wrong_key_is_told_as_such() -> None:
    async with pair() as (far, _):
        await trouble(AgentClient("studio2", far.agent.endpoint, far.keys.public, make_pair()), "key")
        await trouble(AgentClient("studio2", far.agent.endpoint, make_pair().public, make_pair()), "key")


async def test_a_node_that_is_not_there_is_told_as_such() -> None:
    async with pair() as (far, _):
        endpoint = far.agent.endpoint
    await trouble(AgentClient("studio2", endpoint, make_pair().public, make_pair()), "nothing listens there")
