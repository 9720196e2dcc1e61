"""The simulation itself: a seed replays, seeds differ, and a seed that hangs fails."""

import threading

import pytest

from tests.simulation import story
from tests.simulation.quarter import play_seeds
from tests.simulation.story import Hung, play


@pytest.mark.parametrize("seed", [1, 2, 3, 14, 15])
def test_a_seed_replays_the_same_trace(seed: int) -> None:
    first, second = play(seed), play(seed)
    assert first.trace == second.trace
    assert first.digest == second.digest
    assert first.turns == second.turns


def test_seeds_differ() -> None:
    assert len({play(seed).digest for seed in range(10)}) == 10


def test_a_seed_that_waits_for_something_real_fails_after_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait_for_a_lock(*_: object) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    monkeypatch.setattr(story, "WALL_S", 0.2)
    monkeypatch.setattr(story.Story, "run", wait_for_a_lock)
    assert isinstance(play(0).failure, Hung)


# The seeds are the first in which a gateway logs these words. A change of the stories may need others.
@pytest.mark.parametrize(("seed", "words"), [(19, "is stuck"), (60, "does not answer its new gateway")])
def test_gateways_find_fault_with_workers_in_the_words_that_the_story_looks_for(seed: int, words: str) -> None:
    lines = play_seeds(seed, 1).stdout.splitlines()
    assert any(" log worker " in line and words in line for line in lines)
