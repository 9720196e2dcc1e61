"""Rank 0's watch of a plan: a slow group is waited for, and a stuck one ends by the name of who is behind."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

import pytest
import zmq

from protocol import group, sockets
from protocol.group import RankHeartbeat
from protocol.sockets import KeyPair
from protocol.spec import RankSpec
from tests.support.ranks import group_spec, ranks_with
from tests.support.scale import patient
from worker.group.rank_heartbeats import LeadWatch, RankProgress, RankSockets

STEP_S = patient(0.25)


class Watched:
    """Rank 0's watch in this process, which has begun plan 1, and the socket of its follower."""

    def __init__(self, first: RankSpec, other: RankSpec) -> None:
        self.progress = RankProgress(0.0)
        self.sockets = RankSockets(first)
        self.reasons: SimpleQueue[str] = SimpleQueue()
        self.watch = LeadWatch(
            first, ("local", "studio2"), self.sockets, self.progress, lambda why, _: self.reasons.put(why.message)
        )
        self.watch.start()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.follower = sockets.connect_secure_dealer(
            self.context,
            first.watch,
            group.identity(1),
            first.server,
            KeyPair(other.public, other.secret),
        )
        self.watch.begin(1)
        # Its own part is done: it waits for its follower.
        self.progress.finish()

    def beat(self, seconds: float, beat: Callable[[], RankHeartbeat]) -> str:
        """Send beats for so long, or until the group is lost; returns the reason."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.follower.send(group.encode(beat()))
            try:
                return self.reasons.get(timeout=0.05)
            except Empty:
                pass
        return ""

    def close(self) -> None:
        self.progress.end()
        self.follower.close(0)
        self.context.term()
        self.watch.close()
        self.sockets.close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Callable[[float], Watched]]:
    running: list[Watched] = []

    def start(stuck_s: float) -> Watched:
        deadlines = {"beat_s": patient(60), "step_s": STEP_S, "stuck_s": stuck_s}
        first, other = ranks_with(group_spec(tmp_path, "tensor"), **deadlines)
        assert first.rank is not None
        assert other.rank is not None
        running.append(Watched(first.rank, other.rank))
        return running[0]

    yield start
    for each in running:
        each.close()


def test_a_rank_that_its_machine_hardly_runs_is_waited_for(watched: Callable[[float], Watched]) -> None:
    ranks = watched(patient(60))
    assert ranks.beat(4 * STEP_S, lambda: RankHeartbeat(1, 0, 0.1)) == ""


def test_ranks_that_use_their_cpu_time_in_vain_are_stuck(watched: Callable[[float], Watched]) -> None:
    ranks = watched(patient(60))
    reason = ranks.beat(patient(30), lambda: RankHeartbeat(1, 0, STEP_S + 0.1))
    assert "plan 1 has taken" in reason
    assert "rank 1 (studio2) has not done it either" in reason


def test_cpu_time_of_the_plan_before_does_not_count(watched: Callable[[float], Watched]) -> None:
    ranks = watched(patient(60))
    assert ranks.beat(4 * STEP_S, lambda: RankHeartbeat(0, 0, 100.0)) == ""


def test_a_plan_is_not_waited_for_forever_however_little_its_ranks_run(watched: Callable[[float], Watched]) -> None:
    ranks = watched(3 * STEP_S)
    assert "rank 1 (studio2) has not done it either" in ranks.beat(patient(30), lambda: RankHeartbeat(1, 0, 0.0))
