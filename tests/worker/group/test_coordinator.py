"""Rank 0's side of the plan, without an engine: answers count once, and only those of the group's followers."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest
import zmq

from protocol import group, sockets
from protocol.failures import Failure
from protocol.from_worker import RankInfo
from protocol.group import JoinGroup, RankHeartbeat, Versions
from protocol.sockets import KeyPair
from protocol.spec import RankSpec
from protocol.to_worker import Shutdown
from tests.support.ranks import group_spec, ranks_with
from tests.support.scale import patient
from worker.errors import LoadFailed, PartnerLost
from worker.group.coordinator import Coordinator
from worker.group.rank_agreement import Identity

VERSIONS = Versions("1", "2", "3")
STRANGER = 7


@dataclass
class Ranks:
    """Rank 0 of three in this process, and sockets with the keys of its followers."""

    lead: Coordinator
    ranks: list[RankSpec]
    lost: list[Failure]
    _context: Any
    _open: list[Any] = field(default_factory=list)

    def say(self, rank: int, *messages: group.Up | group.Watch, name: int | None = None, watch: bool = False) -> Any:
        """Send messages by a new connection of this rank, under the routing id `name` if it is another."""
        own = self.ranks[rank]
        address = own.watch if watch else own.plan
        identity = group.identity(rank if name is None else name)
        keys = KeyPair(own.public, own.secret)
        socket = sockets.connect_secure_dealer(self._context, address, identity, own.server, keys)
        self._open.append(socket)
        assert socket.poll(patient(20) * 1000, zmq.POLLOUT), "it is admitted by its key"
        for message in messages:
            socket.send(group.encode(message))
        return socket

    def gather(self) -> str:
        """The reason why the group does not begin."""
        with pytest.raises(PartnerLost) as error:
            self.lead.gather(Identity(VERSIONS, "form"), "tensor", "ring")
        return error.value.failure.message

    def close(self) -> None:
        for socket in self._open:
            socket.close(0)
        self._context.term()


def join(rank: int) -> JoinGroup:
    return JoinGroup(1, RankInfo(rank, "local", "host", 99), VERSIONS, "form")


@pytest.fixture
def start(tmp_path: Any) -> Iterator[Callable[..., Ranks]]:
    with ExitStack() as stack:

        def ranks(join_s: float, leave_s: float = 1.0) -> Ranks:
            changes = {"join_s": join_s, "beat_s": patient(60), "leave_s": leave_s}
            first, *others = ranks_with(group_spec(tmp_path, "tensor", 3), **changes)
            assert first.rank is not None
            lost: list[Failure] = []
            lead = Coordinator(first, lambda failure, _status: lost.append(failure))
            stack.callback(lead.leave)
            specs = [first.rank, *(each.rank for each in others if each.rank is not None)]
            running = Ranks(lead, specs, lost, zmq.Context())
            stack.callback(running.close)
            return running

        yield ranks


def test_an_answer_under_a_rank_that_the_group_does_not_have_is_not_counted(start: Callable[[float], Ranks]) -> None:
    ranks = start(1.0)
    ranks.say(1, join(1))
    ranks.say(1, join(STRANGER), name=STRANGER)
    assert ranks.gather() == "rank 2 (local) did not join in time"


def test_an_answer_that_comes_twice_ends_the_group(start: Callable[[float], Ranks]) -> None:
    ranks = start(patient(20))
    ranks.say(1, join(1), join(1))
    assert "rank 1 (local) sent JoinGroup twice" in ranks.gather()


def test_a_message_that_is_not_waited_for_yet_is_kept_once(start: Callable[[float], Ranks]) -> None:
    ranks = start(patient(20))
    done = group.PlanDone(1, 0)
    ranks.say(2, done, done)
    assert "rank 2 (local) sent PlanDone twice" in ranks.gather()


def test_a_group_does_not_begin_before_each_follower_is_heard_on_the_watch(start: Callable[[float], Ranks]) -> None:
    ranks = start(1.0)
    ranks.say(1, join(1))
    ranks.say(2, join(2))
    ranks.say(1, RankHeartbeat(), watch=True)
    ranks.say(1, RankHeartbeat(), name=STRANGER, watch=True)
    assert "rank 2 (local) joined, and cannot be heard at" in ranks.gather()


def test_a_stop_is_clean_although_a_follower_has_gone(start: Callable[[float], Ranks]) -> None:
    ranks = start(1.0)
    ranks.lead.leave()
    assert ranks.lost == []


def test_a_stop_waits_for_those_who_are_there_although_another_has_gone(start: Callable[..., Ranks]) -> None:
    ranks = start(1.0, leave_s=patient(60))
    plan = ranks.say(2, join(2))
    ranks.say(2, RankHeartbeat(), watch=True)
    assert "rank 1 (local) did not join" in ranks.gather()
    leaving = threading.Thread(target=ranks.lead.leave)
    leaving.start()
    assert plan.poll(patient(20) * 1000)
    order = group.decode_down(plan.recv())
    assert isinstance(order, group.TickPlan)
    assert order.ops == [Shutdown()]
    # It is still busy: rank 0 waits for it.
    monitor = plan.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    has_closed = monitor.poll(500)
    plan.disable_monitor()
    monitor.close(0)
    assert not has_closed
    plan.send(group.encode(group.PlanDone(order.seq, order.crc)))
    leaving.join(patient(20))
    assert not leaving.is_alive()
    assert ranks.lost == []


@pytest.mark.skipif(mx.distributed.is_available("jaccl"), reason="it would connect")
def test_rdma_is_begun_with_a_coordinator(start: Callable[..., Ranks]) -> None:
    ranks = start(patient(20))
    followers = [ranks.say(rank, join(rank)) for rank in (1, 2)]
    for rank in (1, 2):
        ranks.say(rank, RankHeartbeat(), watch=True)
    with pytest.raises(LoadFailed, match="built without the backend 'jaccl'"):
        ranks.lead.gather(Identity(VERSIONS, "form"), "tensor", "jaccl")
    for follower in followers:
        go = group.decode_down(follower.recv())
        assert isinstance(go, group.StartLoading)
        assert go.coordinator.startswith("127.0.0.1:")
