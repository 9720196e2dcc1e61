"""Times that are kept for the next start: the best ones of this start, and a doubt when they are far off twice."""

import pytest

from protocol.timing_profile import FORMAT, ChunkTime, StepTime, TimingProfile
from worker.engine.scheduling.learned import JUDGED_TICKS, LearnedTimes


def wisdom(chunks: tuple[ChunkTime, ...] = (), steps: tuple[StepTime, ...] = (), doubts: int = 0) -> TimingProfile:
    return TimingProfile(
        format=FORMAT, key="k", model="m", path="p", machine="", written=0, chunks=chunks, steps=steps, doubts=doubts
    )


KEPT = wisdom((ChunkTime(0, True, 128, 0.01),), (StepTime(0, 4, 1, 0.02), StepTime(0, 1, 8, 0.03)))


def started(kept: TimingProfile | None, step_s: float, ticks: int = 2 * JUDGED_TICKS) -> LearnedTimes:
    """A start that has seen so many steps of four rows."""
    learned = LearnedTimes(kept)
    for _ in range(ticks):
        learned.stepped(0, 4, 1, step_s)
    return learned


def after(learned: LearnedTimes) -> TimingProfile:
    chunks, steps, doubts = learned.merged()
    return wisdom(tuple(chunks), tuple(steps), doubts)


def test_the_best_quarter_of_what_was_seen_is_kept_whatever_the_rest_was() -> None:
    learned = LearnedTimes()
    for seconds in (0.01, 0.011, 0.012, 0.013, 0.02, 0.5, 3.0, 9.0):
        learned.chunked(1, 100, seconds, is_riding=False)
    (chunk,) = after(learned).chunks
    assert (chunk.band, chunk.is_riding, chunk.tokens) == (1, False, 128)
    assert chunk.seconds == 0.012


def test_what_this_start_has_not_seen_stays() -> None:
    kept = after(started(KEPT, 0.021))
    assert kept.chunks == KEPT.chunks
    assert {(each.rows, each.width) for each in kept.steps} == {(4, 1), (1, 8)}
    assert kept.doubts == 0


def test_kept_times_follow_what_got_quicker_at_once_and_what_got_slower_slowly() -> None:
    def step_s(seen_s: float) -> float:
        return next(each.seconds for each in after(started(KEPT, seen_s)).steps if each.rows == 4)

    assert step_s(0.015) == 0.015
    assert 0.02 < step_s(0.028) < 0.024


@pytest.mark.parametrize("seen_s", [0.2, 0.002])
def test_times_that_are_far_off_are_doubted_once_and_dropped_at_the_second_start(seen_s: float) -> None:
    doubted = after(started(KEPT, seen_s))
    assert (doubted.chunks, doubted.steps, doubted.doubts) == (KEPT.chunks, tuple(sorted_steps(KEPT)), 1)
    dropped = after(started(doubted, seen_s))
    assert dropped == wisdom((), (StepTime(0, 4, 1, seen_s),))


def test_a_second_start_as_before_ends_the_doubt_and_a_short_one_says_nothing() -> None:
    doubted = after(started(KEPT, 0.2))
    assert after(started(doubted, 0.2, ticks=JUDGED_TICKS - 1)).doubts == 1
    assert after(started(doubted, 0.02)).doubts == 0


def sorted_steps(kept: TimingProfile) -> list[StepTime]:
    return sorted(kept.steps, key=lambda each: (each.band, each.rows, each.width))


def test_blocks_are_kept_with_the_plain_steps() -> None:
    learned = started(None, 0.02)
    learned.stepped(0, 4, 7, 0.04)
    _, steps, _ = learned.merged()
    assert steps == [StepTime(0, 4, 1, 0.02), StepTime(0, 4, 8, 0.04)]
    assert LearnedTimes(wisdom(steps=tuple(steps))).steps() == {(4, 1): 0.02, (4, 8): 0.04}


def test_times_of_no_length_or_of_hours_are_not_kept() -> None:
    learned = LearnedTimes()
    for rows, seconds in ((1, 0.0), (2, 1e4), (4, 0.02)):
        learned.stepped(0, rows, 1, seconds)
    _, steps, _ = learned.merged()
    assert [each.rows for each in steps] == [4]
