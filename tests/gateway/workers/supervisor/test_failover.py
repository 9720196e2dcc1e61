"""Sequences that lose their worker: who goes on, who waits, who is to blame."""

import asyncio

import pytest

from gateway.link.parked_sequences import EXPIRY_S, SIZE_MAX, Quarantine, ResumeLimits, fingerprint
from gateway.workers.supervisor.state import ModelUnavailable, State, WorkerLimits
from protocol.failures import Code
from protocol.from_worker import Drained
from protocol.to_worker import Generate, Sampling, Shutdown, TextPrompt
from tests.support.machine import Machine, settle
from tests.support.scale import patient

pytestmark = pytest.mark.anyio


async def die_and_succeed(m: Machine) -> None:
    """The ready worker dies; its successor, started without anybody asking, becomes ready."""
    await m.crash(-9)
    await m.world.pass_time(30.0)
    await m.succeed()
    assert m.worker.state is State.READY


def request(text: str = "hi", rid: int = 1, seed: int = 0, **fields: object) -> Generate:
    return Generate(rid, TextPrompt(text), Sampling(seed=seed), **fields)  # type: ignore[arg-type]


# -- going on --------------------------------------------------------------------------------------------------------


async def test_what_a_dead_worker_leaves_starts_its_successor_and_goes_on_there() -> None:
    async with Machine() as m:
        await m.bring_up()
        one, two = m.run(tokens=3), m.run(tokens=1)
        await m.crash(-9)
        assert (m.worker.state, m.worker.epoch) == (State.STARTING, 2)
        await m.succeed()
        assert m.world.resumed == [(2, one.rid), (2, two.rid)]
        assert m.world.failed == []
        assert m.events.resumes == 2


async def test_nobody_left_means_no_successor() -> None:
    async with Machine() as m:
        await m.bring_up()
        m.leave(m.run())
        await m.crash(-9)
        assert m.worker.state is State.STOPPED


async def test_a_successor_that_dies_while_loading_is_replaced_and_nobody_fails() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=1)
        await m.crash(-9)
        m.hello()
        await settle()
        await m.crash(-9)
        assert m.worker.state is State.BACKOFF
        await m.world.pass_time(5.0)
        await m.succeed()
        assert m.world.resumed == [(3, sequence.rid)]
        assert m.world.failed == []


async def test_a_stuck_worker_is_replaced_and_its_sequences_go_on() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=1)
        m.pong(running=1, step_age_ms=10**6)
        await settle()
        assert m.worker.state is State.STOPPING
        await m.crash(-6)
        await m.succeed()
        assert m.world.resumed == [(2, sequence.rid)]


async def test_a_worker_that_somebody_else_ends_politely_is_replaced_too() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=1)
        m.give_up(sequence)
        await m.crash(0)
        await m.succeed()
        assert m.world.resumed == [(2, sequence.rid)]


async def test_a_worker_that_lost_touch_with_us_gets_its_sequences_back() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=1)
        m.give_up(sequence)
        await m.world.pass_time(2.5)
        assert m.world.resumed == [(1, sequence.rid)]


async def test_parked_sequences_go_before_those_who_waited_for_the_model() -> None:
    async with Machine() as m:
        await m.bring_up()
        m.run(tokens=1)
        await m.crash(-9)
        waiting = await m.ask()
        seen: list[int] = []
        waiting.add_done_callback(lambda _: seen.append(len(m.world.resumed)))
        await m.succeed()
        assert seen == [1]


async def test_a_successor_that_cannot_be_reached_keeps_nothing() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run()
        await m.crash(-9)
        m.world.is_unreachable = True
        await m.succeed()
        assert m.world.resumed == []
        m.world.is_unreachable = False
        await die_and_succeed(m)
        assert m.world.resumed == [(3, sequence.rid)]


async def test_waiting_for_a_successor_is_a_sign_of_life_and_deadlines_hold() -> None:
    async with Machine() as m:
        await m.bring_up()
        patient, late = m.run(), m.run()
        late.deadline = asyncio.get_running_loop().time()
        await m.crash(-9)
        patient.collector.last_activity = 0.0
        await m.world.pass_time(4.0)
        assert patient.collector.last_activity > 0
        assert m.world.failures[late.rid].code is Code.DEADLINE_EXCEEDED
        await m.succeed()
        assert m.world.resumed == [(2, patient.rid)]


# -- ends ------------------------------------------------------------------------------------------------------------


async def test_a_sequence_is_not_resumed_without_end() -> None:
    async with Machine(limits=WorkerLimits(resume=ResumeLimits(fruitless=1))) as m:
        await m.bring_up()
        one, two, lucky = m.run("a"), m.run("b"), m.run("c")
        await die_and_succeed(m)
        await m.speak(lucky)
        await m.crash(-9)
        assert {one.rid, two.rid} == set(m.world.failures)
        assert m.world.failures[one.rid].code is Code.WORKER_DIED
        assert not lucky.is_over


async def test_progress_starts_the_count_anew_up_to_a_limit() -> None:
    async with Machine(limits=WorkerLimits(resume=ResumeLimits(fruitless=1, total=6))) as m:
        m.world.jitter = 0.0
        await m.bring_up()
        sequence = m.run()
        for _ in range(6):
            await m.worker.load()
            await m.speak(sequence)
            await die_and_succeed(m)
        assert not sequence.is_over
        await m.speak(sequence)
        await m.crash(-9)
        assert m.world.failures[sequence.rid].code is Code.WORKER_DIED


async def test_an_open_breaker_ends_them_with_the_reason() -> None:
    async with Machine(limits=WorkerLimits(resume=ResumeLimits(fruitless=100))) as m:
        await m.bring_up()
        sequences = [m.run("a", tokens=1), m.run("b", tokens=1)]
        await m.crash(-9)
        await m.crash(70)
        await m.world.pass_time(10.0)
        await m.crash(70)
        assert m.worker.state is State.FAILED
        assert {m.world.failures[f.rid].code for f in sequences} == {Code.WORKER_DIED}


async def test_a_successor_that_can_never_load_ends_them_with_the_reason() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run()
        await m.crash(-9)
        await m.crash(66)
        assert m.world.failures[sequence.rid].code is Code.MODEL_CORRUPT


async def test_a_load_past_its_deadline_ends_them() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run()
        await m.crash(-9)
        m.hello()
        await m.world.pass_time(601.0)
        assert m.world.failures[sequence.rid].code is Code.LOAD_TIMEOUT


@pytest.mark.parametrize("is_closing", [False, True])
async def test_unload_and_shutdown_end_what_waits_for_a_successor(is_closing: bool) -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run()
        await m.crash(-9)
        stopping = asyncio.create_task(m.worker.stop(30.0, is_closing=is_closing))
        await settle()
        await m.crash(0)
        await stopping
        assert m.world.failures[sequence.rid].code is Code.DRAINING
        assert m.worker.state is State.STOPPED


async def test_unload_drains_and_what_a_dying_worker_leaves_then_is_not_resumed() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run()
        stopping = asyncio.create_task(m.worker.stop(30.0))
        await settle()
        assert not sequence.is_over
        await m.crash(-9)
        await stopping
        assert m.world.failures[sequence.rid].code is Code.WORKER_DIED
        assert m.worker.state is State.STOPPED


async def test_what_has_ended_holds_up_nobody() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=1)
        await m.crash(-9)
        m.leave(sequence)
        newcomer = await m.ask()
        await m.succeed()
        await newcomer
        assert m.worker.is_ready


async def test_one_that_leaves_while_it_waits_for_its_turn_holds_up_nobody() -> None:
    async with Machine() as m:
        await careful(m)
        one, two = m.world.sequences
        m.leave(two)
        await m.speak(one)
        assert m.worker.is_ready


# -- planned restart -------------------------------------------------------------------------------------------------


async def test_a_restart_takes_everything_to_the_next_worker() -> None:
    async with Machine() as m:
        await m.bring_up()
        m.world.sent.clear()
        sequences = [m.run(tokens=count) for count in range(3)]
        restarting = asyncio.create_task(m.worker.restart())
        await settle()
        assert m.world.sent == [Shutdown()]
        assert m.world.detached == [1]
        await m.crash(0)
        await m.succeed()
        await restarting
        assert m.world.resumed == [(2, sequence.rid) for sequence in sequences]
        assert m.world.failed == []
        assert (m.worker.restart_policy.restarts, [f.fruitless_resumes for f in sequences]) == (0, [0, 0, 0])


async def test_restarts_are_nobodys_fault() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run()
        for _ in range(5):
            restarting = asyncio.create_task(m.worker.restart())
            await settle()
            await m.crash(0)
            await m.succeed()
            await restarting
        assert not sequence.is_over
        assert m.events.quarantines == 0


async def test_a_restart_during_an_unload_goes_on_with_what_the_drain_left() -> None:
    async with Machine() as m:
        await m.bring_up()
        sequence = m.run(tokens=1)
        unloading = asyncio.create_task(m.worker.stop(30.0))
        await settle()
        restarting = asyncio.create_task(m.worker.restart())
        await settle()
        m.post(Drained(1, 0))
        await settle()
        await m.crash(0)
        await m.succeed()
        await asyncio.gather(unloading, restarting)
        assert m.world.resumed == [(2, sequence.rid)]


# -- poison ----------------------------------------------------------------------------------------------------------


async def test_a_request_that_was_alone_at_two_deaths_is_quarantined_and_the_others_go_on() -> None:
    async with Machine() as m:
        await m.bring_up()
        others = [m.run("fine", tokens=5), m.run("good", tokens=5)]
        poison = m.run("poison")
        await die_and_succeed(m)
        assert not poison.is_over
        for other in others:
            await m.speak(other)
        await die_and_succeed(m)
        assert m.world.failures[poison.rid].code is Code.QUARANTINED
        assert m.world.resumed[-2:] == [(3, other.rid) for other in others]
        assert m.events.quarantines == 1


async def test_a_quarantined_request_is_refused_whatever_its_seed_until_it_expires() -> None:
    async with Machine() as m:
        await m.bring_up()
        m.run("poison")
        await die_and_succeed(m)
        await m.crash(-9)
        again = request("poison", rid=99, seed=12345, deadline_ms=5, priority=3)
        refusal = m.worker.refusal(again)
        assert refusal is not None
        assert refusal.code is Code.QUARANTINED
        assert m.worker.refusal(request("wine")) is None
        await m.world.pass_time(EXPIRY_S + 1)
        assert m.worker.refusal(again) is None


async def test_two_deaths_with_different_suspects_blame_nobody() -> None:
    async with Machine() as m:
        await m.bring_up()
        first = m.run("a")
        await die_and_succeed(m)
        await m.speak(first)
        second = m.run("b")
        await die_and_succeed(m)
        assert (first.is_over, second.is_over, m.events.quarantines) == (False, False, 0)


async def test_choices_of_one_request_are_one_suspect() -> None:
    async with Machine() as m:
        await m.bring_up()
        choices = [m.run("poison") for _ in range(3)]
        await die_and_succeed(m)
        await m.crash(-9)
        assert {m.world.failures[choice.rid].code for choice in choices} == {Code.QUARANTINED}


async def test_among_many_suspects_the_poison_is_found_and_no_other_is_harmed() -> None:
    async with Machine() as m:
        m.world.jitter = 0.0
        await m.bring_up()
        sequences = [m.run(f"prompt {i}") for i in range(6)]
        poison = sequences[2]
        deaths = 0
        while not poison.is_over:
            # A worker sends everybody a token, in the order in which it was given them, until it meets the poison.
            has_died = False
            for sequence in sequences:
                if sequence.epoch == m.worker.epoch and sequence is poison:
                    await m.crash(-9)
                    has_died = True
                    break
                if sequence.epoch == m.worker.epoch and deaths >= 2:
                    await m.speak(sequence)
            if has_died:
                deaths += 1
                assert deaths < 6
                await m.world.pass_time(30.0)
                await m.succeed()
        assert deaths == 4
        assert m.world.failures == {poison.rid: m.world.failures[poison.rid]}
        assert m.world.failures[poison.rid].code is Code.QUARANTINED
        while any(sequence.epoch == 0 for sequence in sequences if sequence is not poison):
            for sequence in sequences:
                if sequence.epoch == m.worker.epoch:
                    await m.speak(sequence)
        assert m.worker.is_ready


async def careful(m: Machine) -> None:
    """Bring a machine to where it tries its two sequences one by one."""
    await m.bring_up()
    m.run("a")
    m.run("b")
    for _ in range(2):
        await die_and_succeed(m)


async def test_after_two_deaths_without_a_token_sequences_are_tried_one_by_one() -> None:
    async with Machine() as m:
        await careful(m)
        one, two = m.world.sequences
        assert m.world.resumed[-1] == (3, one.rid)
        await m.speak(one)
        assert m.world.resumed[-1] == (3, two.rid)


async def test_new_requests_wait_while_one_is_tried() -> None:
    async with Machine() as m:
        await careful(m)
        one, two = m.world.sequences
        assert not m.worker.is_ready
        newcomer = await m.ask()
        await m.speak(one)
        assert not newcomer.done()
        await m.speak(two)
        assert m.worker.is_ready
        await newcomer


async def test_an_only_suspect_waits_until_the_others_have_a_token() -> None:
    async with Machine() as m:
        await m.bring_up()
        suspect, others = m.run(), [m.run(tokens=2), m.run(tokens=2)]
        await die_and_succeed(m)
        assert [rid for _, rid in m.world.resumed] == [other.rid for other in others]
        await m.speak(others[0])
        assert len(m.world.resumed) == 2
        m.leave(others[1])
        await settle()
        assert m.world.resumed[-1] == (2, suspect.rid)


async def test_a_trial_does_not_hold_up_the_others_for_ever() -> None:
    async with Machine(limits=WorkerLimits(resume=ResumeLimits(trial_s=5.0), pong_s=1000.0)) as m:
        await careful(m)
        await m.world.pass_time(15.0)
        assert [rid for epoch, rid in m.world.resumed if epoch == 3] == [1, 2]
        assert m.worker.is_ready


async def test_whoever_was_tried_when_a_worker_died_comes_last_at_the_next() -> None:
    async with Machine() as m:
        await careful(m)
        one, two = m.world.sequences
        await die_and_succeed(m)
        assert [rid for epoch, rid in m.world.resumed if epoch == 4] == [two.rid]
        assert not one.is_watched
        await m.speak(two)
        assert [rid for epoch, rid in m.world.resumed if epoch == 4] == [two.rid, one.rid]


async def test_a_parked_request_that_is_found_poisonous_is_not_sent_again() -> None:
    async with Machine() as m:
        await m.bring_up()
        m.run("poison")
        await die_and_succeed(m)
        waiting = m.run("poison", tokens=2)
        await m.crash(-9)
        assert m.world.failures[1].code is Code.QUARANTINED
        await m.world.pass_time(30.0)
        await m.succeed()
        assert m.world.failures[waiting.rid].code is Code.QUARANTINED


async def test_a_load_that_fails_is_no_evidence() -> None:
    async with Machine() as m:
        m.world.jitter = 0.0
        await m.bring_up()
        poison = m.run("poison")
        await m.crash(-9)
        await m.crash(-9)
        await m.world.pass_time(1.0)
        await m.succeed()
        assert not poison.is_over
        await m.crash(-9)
        assert m.world.failures[poison.rid].code is Code.QUARANTINED


def test_the_quarantine_is_bounded_and_the_oldest_goes_first() -> None:
    quarantine = Quarantine()
    for index in range(SIZE_MAX + 1):
        quarantine.add(fingerprint(request(f"prompt {index}")), now=float(index))
    assert quarantine.refusal(request("prompt 0"), 1.0) is None
    assert quarantine.refusal(request("prompt 1"), 1.0) is not None


@pytest.mark.parametrize("other", [request("other"), request(max_tokens=3), request(stop=("x",))])
def test_another_request_has_another_fingerprint(other: Generate) -> None:
    assert fingerprint(other) != fingerprint(request())
    assert fingerprint(request(rid=7, seed=8, resume=(1, 2), trace="t")) == fingerprint(request())


async def test_a_newcomer_at_a_worker_that_died_for_good_is_told() -> None:
    async with Machine() as m:
        await m.bring_up()
        m.run()
        await m.crash(66)
        with pytest.raises(ModelUnavailable):
            await asyncio.wait_for(m.worker.ensure_ready(), patient(5))
